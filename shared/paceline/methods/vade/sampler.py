"""VADE's sampler (arXiv 2511.18902, from its abstract; constants and windows are ours)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from paceline.methods.parts.tournament import Tournament
from paceline.plugins import GroupOutcome

Known = Sequence[float]  # alpha, beta and the step at which they were observed
Share = Annotated[float, Field(ge=0.0, le=1.0)]
_PRIOR = 1.0


class Vade(Tournament):
    """Draws the task whose sampled success rate p has the highest gain, of a window of tasks.

    The paper ranks all tasks for each batch; the best of each window of `window` tasks are as many
    from the same distribution, and need no pass over all tasks.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        window: Annotated[int, Field(ge=2, le=64)] = 8,
        uniform: Share = 0.1,
        gain: Literal["hard", "variance"] = "hard",
        decay: Share = 0.9,
        fade: Share = 0.99,
    ) -> None:
        """Gain `hard` is p (1 - p)^2, `variance` is p (1 - p).

        `decay`: what is left of the evidence before at each observation of the task; `fade`: at
        each step without one.
        """
        super().__init__(size, seed=seed, epochs=epochs, width=window, uniform=uniform)
        self._power = 2 if gain == "hard" else 1
        self._decay, self._fade = decay, fade

    def worths(self, known: Sequence[Known | None], now: int, chance: random.Random) -> list[float]:
        """The gain of success rates drawn from the posteriors."""
        rates = [chance.betavariate(*self.posterior(counts, now)) for counts in known]
        return [self.gain(rate) for rate in rates]

    def gain(self, rate: float) -> float:
        """Worth of a group whose task has this success rate."""
        return rate * (1.0 - rate) ** self._power

    def learned(self, known: Known | None, outcome: GroupOutcome, now: int) -> Known:
        """The posterior after a group; rewards are clipped to 0 to 1 and count as successes."""
        # The step of this observation fades by `decay`, those in between by `fade`.
        alpha, beta = self.posterior(known, now - 1)
        solved = sum(min(max(reward, 0.0), 1.0) for reward in outcome.rewards)
        failed = len(outcome.rewards) - solved
        return (
            round(_PRIOR + self._decay * (alpha - _PRIOR) + solved, 6),
            round(_PRIOR + self._decay * (beta - _PRIOR) + failed, 6),
            now,
        )

    def posterior(self, known: Known | None, now: int) -> tuple[float, float]:
        """Alpha and beta of a task as of a step."""
        if known is None:
            return _PRIOR, _PRIOR
        alpha, beta, seen = known
        left = self._fade ** max(now - seen, 0)
        return _PRIOR + left * (alpha - _PRIOR), _PRIOR + left * (beta - _PRIOR)
