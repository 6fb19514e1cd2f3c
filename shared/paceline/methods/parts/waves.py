"""Base class of allocators that start G episodes and add waves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paceline.errors import InvalidError
from paceline.plugins import MAX_WAVE, Context, FinishedEpisode, OpenGroup, Pick, Start


class Waves(ABC):
    """An allocator that begins with G equal episodes, and decides on more once all are finished."""

    def __init__(self, group_size: int) -> None:
        """G is `group_size`.

        Raises:
            InvalidError: the group is larger than a wave.
        """
        if group_size > MAX_WAVE:
            raise InvalidError(f"a first wave of {group_size} episodes; at most {MAX_WAVE}")
        self._size = group_size

    def start(self, pick: Pick, context: Context) -> Sequence[Start]:
        """G episodes."""
        del pick, context
        return (Start(),) * self._size

    @abstractmethod
    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """Another wave, or nothing."""


def solved(episodes: Sequence[FinishedEpisode], *, above: float) -> int:
    """How many episodes have a reward above a threshold."""
    return sum(episode.reward > above for episode in episodes)


def rate(episodes: Sequence[FinishedEpisode]) -> float:
    """The mean reward, each clipped to 0 to 1."""
    return sum(min(max(episode.reward, 0.0), 1.0) for episode in episodes) / len(episodes)
