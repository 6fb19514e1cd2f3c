"""DARS's second wave (arXiv 2508.13755; release: ray_dars_trainer.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.methods.parts.waves import Waves, rate
from paceline.plugins import MAX_WAVE, Context, GroupOutcome, OpenGroup, Start

Schedule = Literal["equal_treatment", "hardness_weighted"]
_MOST: Mapping[Schedule, int] = {"equal_treatment": 32, "hardness_weighted": 64}
_EASY = 0.5  # an accuracy from which on there is no second wave
_DECAY = 0.9  # per batch, of what is known of the budget; ours
_SPENT = "spent"  # key of the memory: groups without success, and all episodes but their extra


class Dars(Waves):
    """G episodes, and more in a second wave the less of them succeed.

    The estimate for prompts without any success makes them the most expensive. So their second
    waves are at most a share of all episodes, as far as the batches before tell: the memory has the
    (decayed) number of such groups, and of all episodes but those of their second waves.
    """

    def __init__(
        self,
        *,
        group_size: int,
        schedule: Schedule = "hardness_weighted",
        with_std: bool = False,
        most: Annotated[int, Field(ge=1, le=4096)] | None = None,
        hopeless_share: Annotated[float, Field(ge=0.0, lt=1.0)] | None = 0.3,
    ) -> None:
        """`with_std`: advantages are divided by the standard deviation of their group.

        `most`: episodes of a group; null: 32 with equal treatment, 64 if weighted by hardness.
        `hopeless_share`: of all episodes, at most these are second waves of groups without success;
        null: no bound.

        Raises:
            InvalidError: the group is larger than a wave.
        """
        super().__init__(group_size)
        self._weighted, self._with_std = schedule == "hardness_weighted", with_std
        self._share = hopeless_share
        self._most = _MOST[schedule] if most is None else most
        self._memory: Mapping[str, Any] = {}

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """The second wave."""
        del context
        if group.waves > 1 or not group.episodes:
            return ()
        accuracy = rate(group.episodes)
        wanted = self.extra(accuracy, len(group.episodes))
        if not accuracy:
            wanted = min(wanted, self.hopeless())
        return (Start(),) * min(wanted, MAX_WAVE)

    def extra(self, accuracy: float, size: int) -> int:
        """Episodes of a second wave after `size` with this accuracy.

        The advantages of a group add up to size S(a), with S(a) = 2 a (1 - a), or 2 sqrt(a (1 - a))
        if divided by the standard deviation. As many more bring them to their peak, at a = 1/2, or
        to 2 (1 - a) times the peak if weighted by hardness. An accuracy of 0 counts as 1 / 2 size.
        """
        a = accuracy or 0.5 / size
        if a >= _EASY:
            return 0
        gain = 2.0 * math.sqrt(a * (1.0 - a)) if self._with_std else 2.0 * a * (1.0 - a)
        peak = size * (1.0 if self._with_std else 0.5)
        target = peak * 2.0 * (1.0 - a) if self._weighted else peak
        wanted = math.ceil((target - size * gain) / gain - 1e-9)
        return max(min(wanted, self._most - size), 0)

    def hopeless(self) -> int:
        """How many episodes the second wave of a group without success may have."""
        if self._share is None:
            return MAX_WAVE
        # Before anything is known, as if all groups were of this kind.
        groups, others = self._memory.get(_SPENT) or (1.0, float(self._size))
        if not groups:
            groups = 1.0
        return math.floor(min(self._share / (1.0 - self._share) * others / groups, MAX_WAVE))

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Decide by this memory from now on."""
        self._memory = memory

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        """Count groups without success in their first waves, and the other episodes."""
        groups, others = (_DECAY * spent for spent in context.memory.get(_SPENT) or (0.0, 0.0))
        for outcome in outcomes:
            hopeless = bool(outcome.rewards) and max(outcome.rewards[: self._size]) <= 0.0
            groups += hopeless
            others += min(len(outcome.rewards), self._size) if hopeless else len(outcome.rewards)
        return {_SPENT: [round(groups, 6), round(others, 6)]} if others else {}
