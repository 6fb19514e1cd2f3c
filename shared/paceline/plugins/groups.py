"""The protocols of filters and advantages, and what a filter is given and returns."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paceline.plugins.episodes import Advantages, Context, EpisodeBatch, Floats


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group of N scored episodes of one task; without those that a filter before has left out.

    All tuples are [N], in the order of the episodes.
    """

    task: int  # position in the task source
    rewards: tuple[float, ...]
    answers: tuple[str, ...]  # as normalised by the reward, clipped; empty: none was found
    lengths: tuple[int, ...]  # policy tokens
    truncated: tuple[bool, ...]
    parts: Mapping[str, tuple[float, ...]] = field(
        default_factory=dict[str, tuple[float, ...]], hash=False
    )
    """The parts of a reward that has several; NaN where an episode lacks a part."""
    replayed: tuple[bool, ...] = ()  # which are guests from earlier groups; empty: none is

    def only(self, indices: Sequence[int]) -> FinishedGroup:
        """The group with these of its episodes."""
        return FinishedGroup(
            self.task,
            tuple(self.rewards[i] for i in indices),
            tuple(self.answers[i] for i in indices),
            tuple(self.lengths[i] for i in indices),
            tuple(self.truncated[i] for i in indices),
            {name: tuple(values[i] for i in indices) for name, values in self.parts.items()},
            tuple(self.replayed[i] for i in indices) if self.replayed else (),
        )


@dataclass(frozen=True, slots=True)
class Keep:
    """The group is trained on; if there are `indices`, only on those of its episodes."""

    indices: Sequence[int] | None = None  # in [0, N), at least one, ascending; None: all

    def of(self, num_episodes: int) -> tuple[int, ...]:
        """Indices of the episodes that are kept of a group of this size.

        Raises:
            TypeError: an index is not an integer.
            ValueError: there are none, or they are not ascending or out of range.
        """
        if self.indices is None:
            return tuple(range(num_episodes))
        return _checked(self.indices, num_episodes)


@dataclass(frozen=True, slots=True)
class Repair:
    """Some episodes are generated again, with other seeds; then filters decide anew.

    A group is repaired at most 3 times; after that these episodes are left out of it.
    """

    indices: Sequence[int]  # in [0, N), at least one, ascending

    def of(self, num_episodes: int) -> tuple[int, ...]:
        """Indices of the episodes to repair of a group of this size; raises as `Keep.of`."""
        return _checked(self.indices, num_episodes)


def _checked(indices: Sequence[int], num_episodes: int) -> tuple[int, ...]:
    if any(isinstance(index, bool) for index in indices):
        raise TypeError(f"indices of episodes are due, not a mask; it gave {indices}")
    found = tuple(operator.index(index) for index in indices)
    ascending = all(a < b for a, b in pairwise(found))
    if not found or not ascending or found[0] < 0 or found[-1] >= num_episodes:
        raise ValueError(
            f"indices {list(found)} of {num_episodes} episodes; at least one is due, "
            f"ascending, from 0 to {num_episodes - 1}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Drop:
    """The group is not trained on; another task takes its place."""

    reason: str  # at most 64 characters; groups are counted by it, the first 32 reasons of a job


class Filter(Protocol):
    """Decides whether a finished group is trained on, and on which of its episodes.

    Several follow each other; each is given what those before it have kept.
    """

    def __call__(self, group: FinishedGroup, **options: Any) -> Keep | Drop | Repair:
        """The decision; it depends on nothing but the group and the options."""
        ...


class Advantage(Protocol):
    """Computes the advantages of a whole batch; several follow each other."""

    def __call__(
        self, batch: EpisodeBatch, context: Context, *args: Any, **options: Any
    ) -> Floats | Advantages:
        """One value per episode [N], or per policy token [T].

        The arrays of `batch` must not be modified.
        """
        ...


def trimmed(successes: Sequence[bool], keep: int) -> list[int]:
    """Indices of `keep` episodes, with a success and a failure if there are both, as DART has it.

    They are the first ones; the last of them makes room for the first of a kind that is missing
    (arXiv 2509.23866).
    """
    chosen = list(range(min(keep, len(successes))))
    present = successes[:keep]
    for kind in (True, False):
        if kind not in present and kind in successes:
            chosen[-1] = successes.index(kind)
    return chosen
