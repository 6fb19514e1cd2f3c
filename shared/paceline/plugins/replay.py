"""The protocol of replays: which finished episodes are stored, and which join a later group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paceline.plugins.episodes import Context
    from paceline.plugins.groups import FinishedGroup

MAX_GUESTS = 512  # of a group


@dataclass(frozen=True, slots=True)
class Stored:
    """A scored episode of an earlier group of the same task."""

    reward: float
    step: int  # of the trainer when its group was decided
    answer: str = ""  # as normalised by the reward, clipped
    length: int = 0  # policy tokens
    truncated: bool = False
    parts: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)


@dataclass(frozen=True, slots=True)
class Guest:
    """A stored episode that joins a group."""

    stored: int  # its place among those that were given
    replaces: int | None = None  # place in the group of the episode that makes room for it


class Replay(Protocol):
    """Keeps episodes, and brings them back as guests of later groups of their task.

    Called inside the experience service, so both must be quick and depend on nothing but their
    arguments.
    """

    def keep(self, group: FinishedGroup, context: Context) -> Sequence[int]:
        """Places of the episodes to store, ascending.

        Asked of every group that filters have kept or dropped, with all its scored episodes but
        without guests.
        """
        ...

    def offer(
        self, group: FinishedGroup, stored: Sequence[Stored], context: Context
    ) -> Sequence[Guest]:
        """The guests of a group whose episodes are all finished, before filters see it.

        `stored` are the episodes of its task from earlier draws, the oldest first; at least one. At
        most 512 of them may join, each once, and one episode of the group must stay.
        """
        ...
