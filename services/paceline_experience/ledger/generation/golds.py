"""Checks the answers of tasks by the rewards that will read them, before a job is accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from paceline.config.job import RewardSpec
from paceline.config.named import named_function
from paceline.errors import InvalidError, plugin_boundary
from paceline.plugins import TaskSource, declared, registry
from paceline.types import Task

CHECK_S = 5.0
"""Wall-clock time for all tasks of a job; answers of later ones are read when they are scored."""
_MOST_SHOWN = 5
_Check = Callable[[Task], None]


def check_golds(
    rewards: Sequence[RewardSpec],
    sources: Mapping[str, TaskSource],
    *,
    world: str,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Read the answers of as many tasks as there is time for, in the order of the tasks.

    Args:
        rewards: parts of the job's reward.
        sources: its tasks, by the field of the job that names them.
        world: its environment.
        clock: seconds, to bound the time.

    Raises:
        InvalidError: names the first rows whose answers a reward cannot read, and how many it are.
    """
    deadline_s = clock() + CHECK_S
    wrong: list[str] = []
    for field, source in sources.items():
        checks = dict(_checks(rewards, world if hasattr(source, "where") else None))
        for position in range(len(source) if checks else 0):
            wrong += _problems(source, position, checks, field)
            if clock() > deadline_s:
                break
    if wrong:
        more = f" (and {len(wrong) - _MOST_SHOWN} more)" if len(wrong) > _MOST_SHOWN else ""
        raise InvalidError("; ".join(wrong[:_MOST_SHOWN]) + more)


def _checks(rewards: Sequence[RewardSpec], world: str | None) -> Iterator[tuple[str, _Check]]:
    """What installed rewards check, by the field of the part; `world`: if the tasks are rows."""
    for index, part in enumerate(rewards):
        if named_function(part) is not None:
            continue
        told = declared(registry.options_of("rewards", part.kind))
        golds = told.golds
        if golds is None and told.row_golds is not None and world is not None:
            golds = partial(told.row_golds, world=world)
        if golds is None:
            continue
        try:
            if told.load is not None:
                told.load(**part.options)
        except ImportError:  # reward workers may have packages that this service lacks
            continue
        yield f"reward.{index}", partial(golds, **part.options)


def _problems(
    source: TaskSource, position: int, checks: Mapping[str, _Check], field: str
) -> Iterator[str]:
    try:
        with plugin_boundary():
            task = source[position]
    except InvalidError:  # the task is dropped when it is drawn
        return
    for part, check in checks.items():
        try:
            with plugin_boundary(passes=(InvalidError,)):
                check(task)
        except InvalidError as error:
            where: Callable[[int], str] | None = getattr(source, "where", None)
            place = where(position) if where is not None else f"task {position}"
            yield f"{field}: {place}: {part}: {error.message}"
