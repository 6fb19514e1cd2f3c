"""Tasks by difficulty, as in the pools of other trainers: easy, normal and hard ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from paceline.errors import InvalidError
from paceline.methods.parts.tournament import Tournament
from paceline.plugins import GroupOutcome

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class DifficultyPools(Tournament):
    """Draws normal tasks, and chosen shares of easy and of hard ones.

    A task is easy if the mean reward of its newest group is at least `easy_threshold`, hard if at
    most `hard_threshold`, and normal in between or if it was never tried.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        window: Annotated[int, Field(ge=2, le=64)] = 8,
        easy_threshold: float = 1.0,
        hard_threshold: float = 0.0,
        easy_fraction: Share = 0.0,
        hard_fraction: Share = 0.0,
    ) -> None:
        """`window`: tasks among which one of the pool that is due is looked for.

        Raises:
            InvalidError: fractions exceed 1, or the thresholds are the wrong way round.
        """
        super().__init__(size, seed=seed, epochs=epochs, width=window, uniform=0.0)
        if easy_fraction + hard_fraction > 1.0:
            raise InvalidError(
                f"experience.sampler: easy_fraction {easy_fraction} and hard_fraction "
                f"{hard_fraction} are more than 1 together"
            )
        if hard_threshold >= easy_threshold:
            raise InvalidError(
                f"experience.sampler: hard_threshold {hard_threshold} must be below "
                f"easy_threshold {easy_threshold}"
            )
        self._easy_from, self._hard_to = easy_threshold, hard_threshold
        self._easy, self._hard = easy_fraction, hard_fraction

    def worths(self, known: Sequence[float | None], now: int, chance: random.Random) -> list[float]:
        """2: of the pool that is due in this draw; 1: normal; 0: another."""
        del now
        due = self._due(chance.random())
        pools = [self._pool(mean) for mean in known]
        return [2.0 if pool == due else float(pool == "normal") for pool in pools]

    def learned(self, known: float | None, outcome: GroupOutcome, now: int) -> float:
        """The mean reward of the group."""
        del known, now
        return round(sum(outcome.rewards) / len(outcome.rewards), 6)

    def _pool(self, known: float | None) -> str:
        if known is None or self._hard_to < known < self._easy_from:
            return "normal"
        return "easy" if known >= self._easy_from else "hard"

    def _due(self, drawn: float) -> str:
        if drawn < self._easy:
            return "easy"
        return "hard" if drawn < self._easy + self._hard else "normal"
