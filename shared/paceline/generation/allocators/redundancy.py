"""More episodes than are needed: the first to finish count (RollArt, arXiv 2512.22560)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import InvalidError
from paceline.plugins import MAX_WAVE, Context, OpenGroup, Pick, Start


class Redundancy:
    """Starts G + `extra` episodes and closes a group with the first G that finish.

    Slow or hanging episodes hold up nothing. It prefers short episodes, by how much is in the
    history (`surplus_share`, `surplus_tokens_mean`).
    """

    def __init__(self, *, group_size: int, extra: int = 1) -> None:
        if not extra > 0 or group_size + extra > MAX_WAVE:
            raise InvalidError(
                f"extra: {extra} with group_size {group_size}; at least 1, and together at most "
                f"{MAX_WAVE}"
            )
        self._size, self._extra = group_size, extra

    def start(self, pick: Pick, context: Context) -> Sequence[Start]:
        """G + `extra` episodes."""
        del pick, context
        return (Start(),) * (self._size + self._extra)

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """Nothing."""
        del group, context
        return ()

    def enough(self, group: OpenGroup) -> bool:
        """Whether G have finished."""
        return len(group.episodes) >= self._size
