"""The protocol of rewards, which score single episodes."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.types import Score, Task


@dataclass(frozen=True, slots=True)
class RewardInput:
    """The input of a reward part."""

    episode_id: str
    task: Task
    response: str
    environment_reward: float = 0.0
    truncated: bool = False


class Reward(Protocol):
    """Scores one episode; may raise, hang or crash without affecting other episodes."""

    def __call__(self, item: RewardInput, **options: Any) -> Score | float | Awaitable[Score]:
        """The score, as a number or a full `Score`."""
        ...
