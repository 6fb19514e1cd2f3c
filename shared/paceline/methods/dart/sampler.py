"""DART's order of tasks (arXiv 2509.23866; release: dart_rollouter, task_loader.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from paceline.methods.parts.tournament import Tournament
from paceline.plugins import GroupOutcome

Rewards = Sequence[float]


class DartOrder(Tournament):
    """Tasks that were never tried first, then those with the lowest success rate.

    The release sorts all of its few hundred tasks; here those of a window are compared.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        window: Annotated[int, Field(ge=2, le=64)] = 8,
        last: Annotated[int, Field(ge=1, le=256)] = 8,
    ) -> None:
        """`last`: how many of the newest episodes of a task its success rate is the mean of."""
        super().__init__(size, seed=seed, epochs=epochs, width=window, uniform=0.0)
        self._last = last

    def worths(
        self, known: Sequence[Rewards | None], now: int, chance: random.Random
    ) -> list[float]:
        """Minus the success rate; above any for tasks that were never tried."""
        del now, chance
        return [float("inf") if reward is None else -sum(reward) / len(reward) for reward in known]

    def learned(self, known: Rewards | None, outcome: GroupOutcome, now: int) -> Rewards:
        """The newest rewards."""
        del now
        return [*(known or ()), *(round(reward, 6) for reward in outcome.rewards)][-self._last :]
