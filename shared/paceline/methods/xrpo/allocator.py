"""XRPO's planner of rollouts (arXiv 2510.06672, section 3; bonus and price are ours)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from paceline.errors import InvalidError
from paceline.methods.parts.student_t import quantile
from paceline.methods.parts.waves import Waves, solved
from paceline.methods.xrpo.corpus import remembered, seeded
from paceline.methods.xrpo.transform import SEEDED
from paceline.plugins import MAX_WAVE, MAX_WAVES, Context, GroupOutcome, OpenGroup, Start

_PRICE = "price"  # key of the memory
_CHEAPEST, _DEAREST = 1e-6, 1e3
_GAIN = 0.5


class XrpoPlanner(Waves):
    """A few episodes of each prompt, then more where they tell most about its mean reward.

    The paper ranks the prompts of a batch in each round. Here groups are decided one by one, as
    their episodes finish: one gets another round while its priority is at least a price, which the
    memory keeps. It rises while groups have more than G episodes on the mean, and falls while they
    have fewer, so that the budget is G episodes a prompt.
    """

    def __init__(
        self,
        *,
        group_size: int,
        first: Annotated[int, Field(ge=2, le=MAX_WAVE)] | None = None,
        step: Annotated[int, Field(ge=1, le=MAX_WAVE)] | None = None,
        most: Annotated[int, Field(ge=2, le=4096)] | None = None,
        rounds: Annotated[int, Field(ge=1, le=MAX_WAVES - 2)] = MAX_WAVES - 2,
        alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05,
        explore: Annotated[float, Field(ge=0.0)] = 0.1,
        seeds: Annotated[int, Field(ge=0, le=64)] = 0,
        success: float = 0.5,
    ) -> None:
        """`first` episodes of each prompt, then up to `rounds` times `step`, at most `most` in all.

        If null, they are G / 2, G / 4 and 4 G, rounded down, and at least 2, 1 and 2.

        `alpha`: 1 minus the confidence of the intervals; `explore`: factor of the bonus.

        `seeds`: if all have failed in the end, as many episodes with the variant `seeded`, for a
        transform that shows solved examples in the prompt. `success`: rewards above it are
        successes.

        Raises:
            InvalidError: `first` is more than G, so that the budget is spent before it is planned.
        """
        super().__init__(max(group_size // 2, 2) if first is None else first)
        if self._size > group_size:
            raise InvalidError(f"first: {self._size} with experience.group_size {group_size}")
        self._budget, self._rounds = group_size, rounds
        self._step = max(group_size // 4, 1) if step is None else step
        self._most = 4 * group_size if most is None else most
        self._alpha, self._explore = alpha, explore
        self._seeds, self._success = seeds, success
        self._memory: Mapping[str, Any] = {}

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """Another round, or the seeded wave."""
        del context
        if any(episode.start.variant == SEEDED for episode in group.episodes):
            return ()
        size = len(group.episodes)
        if group.waves <= self._rounds and size < self._most and self._pays(group):
            return (Start(),) * min(self._step, self._most - size)
        failed = not solved(group.episodes, above=self._success)
        return seeded(self._memory, self._seeds) if failed else ()

    def priority(self, deviation: float, size: int, played: int) -> float:
        """The expected gain of one more episode, and a bonus for prompts that were tried less.

        `deviation` of `size` rewards, after `played` rounds.
        """
        gained = self.half_width(deviation, size) - self.half_width(deviation, size + 1)
        return gained + self._explore * math.sqrt(math.log1p(played) / size)

    def half_width(self, deviation: float, size: int) -> float:
        """Half of the confidence interval of a mean reward."""
        return quantile(1.0 - self._alpha / 2.0, size - 1) * deviation / math.sqrt(size)

    def price(self) -> float:
        """The priority that a group needs; before any is known, that of even odds after G."""
        return self._price_in(self._memory)

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Decide by this memory from now on."""
        self._memory = memory

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        """Adapt the price to how many episodes groups had, and keep what was solved as examples."""
        sizes = [len(outcome.rewards) for outcome in outcomes if outcome.rewards]
        if not sizes:
            return {}
        before = self._price_in(context.memory)
        # A price that returns to where it was has had the budget on the mean.
        change = math.exp(_GAIN * (statistics.mean(sizes) / self._budget - 1.0))
        price = min(max(before * change, _CHEAPEST), _DEAREST)
        return {_PRICE: price, **remembered(context.memory, outcomes, success=self._success)}

    def _price_in(self, memory: Mapping[str, Any]) -> float:
        known = memory.get(_PRICE)
        return self.priority(0.5, self._budget, 1) if known is None else float(known)

    def _pays(self, group: OpenGroup) -> bool:
        rewards = group.rewards
        if len(rewards) < 2:
            return True
        deviation = statistics.stdev(rewards)
        return self.priority(deviation, len(rewards), group.waves) >= self.price()
