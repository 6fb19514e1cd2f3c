"""SCOPE's second wave (arXiv 2602.24110, from its abstract; how steps are judged is ours)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from paceline.methods.parts.continuation import continued, furthest
from paceline.methods.parts.waves import Waves, solved
from paceline.plugins import Context, OpenGroup, Start


class Scope(Waves):
    """G episodes; if none succeeds, a continuation of the one that came furthest."""

    def __init__(
        self,
        *,
        group_size: int,
        count: Annotated[int, Field(ge=1, le=64)] = 1,
        share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5,
        success: float = 0.5,
    ) -> None:
        """`count` continuations, of as many episodes if so many have failed after a good step.

        `share`: of its turns, what is kept of an episode if nothing tells which of them was wrong;
        1 for all but the last, where an error ends the episode. `success`: rewards above it are
        successes.

        Raises:
            InvalidError: the group is larger than a wave.
        """
        super().__init__(group_size)
        self._count, self._share, self._success = count, share, success

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """Continuations after a first wave without success; none if all failed at once."""
        del context
        if group.waves > 1 or solved(group.episodes, above=self._success):
            return ()
        parents = furthest(group, success=self._success, share=self._share)
        return continued(parents[: self._count], self._count, variant="scope")
