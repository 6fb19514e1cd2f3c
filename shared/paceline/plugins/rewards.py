"""Rewards: scores of single episodes."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.types import Score, Task


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward part may look at."""

    episode_id: str
    task: Task
    response: str
    environment_reward: float = 0.0
    truncated: bool = False


class Reward(Protocol):
    """Score of one episode by one part; may raise, hang or crash without harm to others."""

    def __call__(self, item: RewardInput, **options: Any) -> Score | float | Awaitable[Score]:
        """Points, or a whole `Score`."""
        ...
