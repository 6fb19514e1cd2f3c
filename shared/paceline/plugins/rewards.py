"""The protocol of rewards, which score single episodes."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.types import Score, Task


@dataclass(frozen=True, slots=True)
class RewardTurn:
    """One turn of the policy, with the environment's reward for it."""

    text: str
    reward: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RewardInput:
    """The input of a reward part."""

    episode_id: str
    task: Task
    response: str
    """Text of the last turn."""
    environment_reward: float = 0.0
    truncated: bool = False
    turns: tuple[RewardTurn, ...] = ()
    max_tokens: int = 0
    """The job's bound of the tokens of a turn."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rewards of the parts that the job lists as `after` of this one, by name."""
    variant: str = ""
    """Of the prompt, as named by the transform, the allocator or the sampler."""
    variant_meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What they say of it."""


class Reward(Protocol):
    """Scores one episode; may raise, hang or crash without affecting other episodes."""

    def __call__(self, item: RewardInput, **options: Any) -> Score | float | Awaitable[Score]:
        """The score, as a number or a full `Score`."""
        ...
