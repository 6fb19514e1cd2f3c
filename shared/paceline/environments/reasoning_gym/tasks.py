"""Any data set of reasoning_gym as a task source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, cast

from paceline.errors import InvalidError
from paceline.errors.extras import installing
from paceline.platform.digest import number, task_id
from paceline.types import Task

_ENVIRONMENT = "reasoning_gym"
_MOST_SEED = 1 << 30
_MOST_TRIES = 256
_MAX_SIZE = 10_000_000
_FREE_NUMBER = 1000  # numbers in data set options may always be this large
_TIMES_DEFAULT = 100  # and this many times the option's default
_PATH = re.compile(r"[/\\].|.[/\\]")  # a slash alone is an operator
_SHOWN_CHARS = 100
_HELDOUT_SHARE = 4  # one question in this many is held out


def make_dataset(name: str, *, seed: int, size: int, config: dict[str, Any]) -> Any:
    """Create a data set by name.

    Raises:
        InvalidError: reasoning_gym is missing, or has no such data set or option.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise InvalidError(
            f"reasoning_gym is not installed; {installing('reasoning-gym')}"
        ) from None
    for option, value in config.items():
        _check_numbers(name, option, value)
        _check_paths(name, option, value)
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise InvalidError(f"tasks.options: reasoning_gym data set {name!r}: {error}") from None


def _check_numbers(name: str, option: str, value: Any) -> None:
    """Bound numbers relative to the data set's defaults, since it would generate any size."""
    from reasoning_gym.factory import DATASETS

    default = getattr(DATASETS[name][1](), option, None) if name in DATASETS else None
    most = max(_FREE_NUMBER, _TIMES_DEFAULT * max(_numbers(default), default=0))
    largest = max(_numbers(value), default=0)
    if largest > most:
        raise InvalidError(
            f"tasks.options.{option}: {largest}; at most {most:g} is allowed for {name!r}"
        )


def _check_paths(name: str, option: str, value: Any) -> None:
    """Refuse paths: a data set would show the lines of any file that this process can read."""
    for text in _leaves(value):
        if isinstance(text, str) and _PATH.search(text):
            raise InvalidError(
                f"tasks.options.{option}: {text[:_SHOWN_CHARS]!r} looks like a path; allowed for "
                f"{name!r} are files that come with reasoning_gym, by their names alone"
            )


def _numbers(value: Any) -> Iterator[float]:
    """The absolute values of all numbers within a value."""
    yield from (abs(leaf) for leaf in _leaves(value) if isinstance(leaf, (int, float)))


def _leaves(value: Any) -> Iterator[Any]:
    """All that is no list, tuple or mapping within a value, and all keys."""
    if isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves([*cast("dict[Any, Any]", value).items()])
    else:
        yield value


class ReasoningGymTasks:
    """`size` questions of one data set; other options are passed to the data set.

    `system_prompt` and `extract` are for the environment, which gets the same options.

    The digest of a question decides its split, so that a held-out question is never trained on,
    even if a data set repeats itself.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        dataset: str = "chain_sum",
        size: int = 10_000,
        split: Literal["train", "heldout"] = "train",
        system_prompt: str = "",
        extract: Literal["tag", "tag_only", "whole"] = "tag",
        **config: Any,
    ) -> None:
        if split not in ("train", "heldout"):
            raise InvalidError(f"tasks.options.split: {split!r}; allowed: train, heldout")
        del system_prompt, extract
        if not 0 <= size <= _MAX_SIZE:
            raise InvalidError(f"tasks.options.size: {size}; allowed: 0 to {_MAX_SIZE}")
        self._seed, self._size, self._heldout = seed, size, split == "heldout"
        self._name = dataset
        # A data set adds the index to its seed, so adjacent seeds would share questions.
        base = number(seed, dataset) % _MOST_SEED
        self._dataset = make_dataset(dataset, seed=base, size=max(size, 1), config=config)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        entry = self._entry(position)
        entry = {**entry, "metadata": pack(entry["metadata"]), "dataset": self._name}
        payload = json.dumps(entry)
        identity = task_id(_ENVIRONMENT, payload, 0)
        return Task(identity, _ENVIRONMENT, payload, domain=f"reasoning_gym/{self._name}")

    def _entry(self, position: int) -> dict[str, Any]:
        for attempt in range(_MOST_TRIES):
            entry = self._at(position, attempt)
            if is_heldout(entry["question"]) == self._heldout:
                return entry
        split = "heldout" if self._heldout else "train"
        raise InvalidError(
            f"tasks.options.dataset: {self._name!r} has too few different questions "
            f"to find one for the split {split!r}"
        )

    def _at(self, position: int, attempt: int) -> dict[str, Any]:
        """An entry of the data set; most have entries beyond their size, others wrap around."""
        try:
            return self._dataset[position + attempt * self._size]
        except IndexError:
            return self._dataset[number(position, attempt) % self._size]


def is_heldout(question: str) -> bool:
    """Whether a question belongs to the held-out split."""
    return number("heldout", question) % _HELDOUT_SHARE == 0


def pack(value: Any) -> Any:
    """Convert to JSON types; a tuple becomes `{"()": [...]}`, since some scorers need tuples."""
    if isinstance(value, tuple):
        return {"()": [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    return value


def unpack(value: Any) -> Any:
    """Decode the result of `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"()"}:
            return tuple(unpack(item) for item in value["()"])
        return {key: unpack(item) for key, item in value.items()}
    return value
