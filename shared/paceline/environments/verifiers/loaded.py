"""Loads environments of verifiers, and scores with their rubrics."""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import verifiers  # pyright: ignore[reportMissingImports]
from verifiers.envs import environment as environments  # pyright: ignore[reportMissingImports]

from paceline.errors import InvalidError, PacelineError

_failures: ContextVar[list[str]] = ContextVar("failures of reward functions")


class VerifiersError(PacelineError):
    """An environment or its rubric has failed."""


class _NoSignals:
    """Stands in for the module `signal` where environments are made.

    They set handlers of the whole process, which only its main thread may do.
    """

    SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM
    default_int_handler = staticmethod(signal.default_int_handler)

    @staticmethod
    def signal(*_: Any) -> None:
        """Keep the handlers as they are."""


environments.signal = _NoSignals


class LoadedEnvironments:
    """The environments of this process, each loaded once; may be used from several threads."""

    def __init__(self) -> None:
        self._environments: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def get(self, name: str, key: str, arguments: Mapping[str, Any]) -> Any:
        """The environment with an id and arguments, for which `key` stands; may take minutes.

        Raises:
            InvalidError: it cannot be loaded, or scores groups only.
        """
        with self._lock:
            if (name, key) not in self._environments:
                self._environments[name, key] = _load(name, arguments)
            return self._environments[name, key]


def row_of(environment: Any, split: str, number: int) -> dict[str, Any]:
    """A row of the data set.

    Raises:
        InvalidError: it has fewer rows.
    """
    train = split == "train"
    rows = environment.get_dataset() if train else environment.get_eval_dataset()
    if number >= len(rows):
        raise InvalidError(f"tasks.options.size: the data set has {len(rows)} rows")
    return dict(rows[number])


async def score(environment: Any, state: Any) -> float:
    """The reward of a rollout that is over.

    A rubric counts a reward function that raises as 0 and goes on; here it fails the attempt.

    Raises:
        VerifiersError: a reward function has failed.
    """
    failures: list[str] = []
    _failures.set(failures)
    await environment.rubric.score_rollout(state)
    await environment.rubric.cleanup(state)
    if failures:
        raise VerifiersError(f"a reward function has failed: {failures[0]}")
    return float(state["reward"])


def _load(name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        environment = verifiers.load_environment(name, **arguments)
    except (ValueError, RuntimeError, TypeError, AttributeError, ImportError) as error:
        raise InvalidError(f"tasks.options.id: {name!r} cannot be loaded: {error}") from None
    if environment.rubric.has_group_rewards:
        raise InvalidError(
            f"tasks.options.id: {name!r} compares the rollouts of a group; "
            "rewards of single episodes are needed"
        )
    for rubric in _rubrics(environment):
        rubric.funcs = [_watch(function) for function in rubric.funcs]
    return environment


def _rubrics(environment: Any) -> Iterator[Any]:
    """All rubrics that score rollouts of an environment, each once."""
    rubrics: dict[int, Any] = {}
    left = [environment]
    while left:
        part = left.pop()
        left += [*getattr(part, "envs", ()), *getattr(part, "rubrics", ())]
        if (rubric := getattr(part, "rubric", None)) is not None:
            left.append(rubric)
        if hasattr(part, "funcs"):
            rubrics[id(part)] = part
    yield from rubrics.values()


def _watch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function, with a record of what it raises."""

    @functools.wraps(function)
    async def watched(*arguments: Any, **named: Any) -> Any:
        try:
            value = function(*arguments, **named)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:  # the boundary of the environment's code
            _failures.get([]).append(f"{type(error).__name__}: {error}")
            raise

    return watched
