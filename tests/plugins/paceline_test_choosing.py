"""Filters that keep a part of a group."""

from collections.abc import Sequence
from typing import Any

from paceline.platform.digest import number
from paceline.plugins import Drop, FinishedGroup, Keep, Repair


def chosen(task: int, size: int, seed: int) -> list[int]:
    """Any subset of a group's episodes, also none, as task and seed say."""
    bits = number("chosen", seed, task)
    return [index for index in range(size) if bits >> index & 1]


def any_subset(group: FinishedGroup, *, seed: int) -> Keep | Drop:
    """Keep any subset of the episodes, or drop the group."""
    indices = chosen(group.task, len(group.rewards), seed)
    return Keep(indices) if indices else Drop("none")


def at_least_one(group: FinishedGroup, *, seed: int) -> Keep:
    """Keep any subset of the episodes that is not empty."""
    return Keep(chosen(group.task, len(group.rewards), seed) or [0])


def these(group: FinishedGroup, *, indices: Sequence[int]) -> Keep:
    """Keep these episodes, whatever the group."""
    del group
    return Keep(indices)


def successes(group: FinishedGroup) -> Keep | Drop:
    """Keep the episodes with a reward."""
    indices = [index for index, reward in enumerate(group.rewards) if reward > 0]
    return Keep(indices) if indices else Drop("none")


def repairing(group: FinishedGroup, *, below: float = 0.5) -> Keep | Repair:
    """Have episodes with less reward generated again."""
    poor = [index for index, reward in enumerate(group.rewards) if reward < below]
    return Repair(poor) if poor else Keep()


def any_repair(group: FinishedGroup, *, seed: int) -> Keep | Repair:
    """Have any subset of the episodes generated again."""
    indices = chosen(group.task, len(group.rewards), seed)
    return Repair(indices) if indices else Keep()


def having(group: FinishedGroup, **values: Any) -> Keep | Drop:
    """Keep the episodes with one of these values in a column or a part of the reward."""
    columns: dict[str, Sequence[Any]] = {
        "rewards": group.rewards,
        "answers": group.answers,
        "lengths": group.lengths,
        "truncated": group.truncated,
        **group.parts,
    }
    fits = [
        index
        for index in range(len(group.rewards))
        if all(columns[name][index] in wanted for name, wanted in values.items())
    ]
    return Keep(fits) if fits else Drop("none")
