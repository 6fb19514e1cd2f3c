"""Plain experience replay: a share of each group comes from earlier groups of its task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from paceline.plugins import MAX_GUESTS, Context, FinishedGroup, Guest, Stored


class ExperienceReplay:
    """Every group gets the newest stored episodes of its task, up to a share and an age.

    They join the group; nothing of it is replaced. Without a correction of the objective such as
    `tis`, their gradient is biased.
    """

    def __init__(
        self,
        *,
        share: Annotated[float, Field(gt=0.0, le=0.9)] = 0.25,
        max_age: Annotated[int, Field(gt=0, le=1_000_000)] = 16,
        at_least: float | None = None,
    ) -> None:
        """How much is replayed.

        Args:
            share: of the episodes of a group, guests included.
            max_age: steps since the episode's group was decided, at most.
            at_least: only episodes with this reward are stored; all, if null.
        """
        self._share, self._max_age, self._at_least = share, max_age, at_least

    def keep(self, group: FinishedGroup, context: Context) -> Sequence[int]:
        """All, or those with the least reward."""
        del context
        least = self._at_least
        found = enumerate(group.rewards)
        return tuple(place for place, reward in found if least is None or reward >= least)

    def offer(
        self, group: FinishedGroup, stored: Sequence[Stored], context: Context
    ) -> Sequence[Guest]:
        """The newest ones: n of them with n / (n + N) close to the share, N in the group."""
        wanted = min(round(self._share / (1.0 - self._share) * len(group.rewards)), MAX_GUESTS)
        fresh = [n for n, each in enumerate(stored) if context.step - each.step <= self._max_age]
        return tuple(Guest(place) for place in fresh[max(0, len(fresh) - wanted) :])
