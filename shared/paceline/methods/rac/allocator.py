"""RaC's rounds of recoveries (arXiv 2509.07953, by the policy itself; numbers are ours)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from paceline.methods.parts.continuation import continued, furthest
from paceline.methods.parts.waves import Waves, solved
from paceline.plugins import MAX_WAVES, Context, OpenGroup, Start


class Rac(Waves):
    """G episodes, then rounds of recoveries until enough of a group have succeeded."""

    def __init__(
        self,
        *,
        group_size: int,
        count: Annotated[int, Field(ge=1, le=64)] = 2,
        rounds: Annotated[int, Field(ge=1, lt=MAX_WAVES)] = 4,
        parents: Annotated[int, Field(ge=1, le=64)] = 1,
        wanted: Annotated[int, Field(ge=1, le=64)] = 1,
        share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5,
        success: float = 0.5,
    ) -> None:
        """`count` recoveries a round, up to `rounds`, while less than `wanted` have succeeded.

        They continue in turn the `parents` failed episodes that came furthest, recoveries of
        earlier rounds among them. `share`: of its turns, what is kept of an episode if nothing
        tells which of them was wrong; 1 for all but the last, where an error ends the episode.
        `success`: rewards above it are successes.

        Raises:
            InvalidError: the group is larger than a wave.
        """
        super().__init__(group_size)
        self._count, self._rounds = count, rounds
        self._parents, self._wanted = parents, wanted
        self._share, self._success = share, success

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """A round of recoveries; none if no failed episode has a good state."""
        del context
        done = solved(group.episodes, above=self._success) >= self._wanted
        if done or group.waves > self._rounds:
            return ()
        parents = furthest(group, success=self._success, share=self._share)
        return continued(parents[: self._parents], self._count, variant="recovery")
