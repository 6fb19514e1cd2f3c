from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.platform.fair_queue import FairQueue
from paceline.plugins import RewardInput
from paceline.plugins.allowed import AllowedTargets
from paceline.types import Task
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.scorer import Scorer

FUNCTIONS = Path(__file__).parent / "functions"
_NAMES = ("by_response", "endless", "later", "no_such", "pid", "stray", "told")
_OTHERS = ("no_such_module:f", "broken_import:f", "noisy_import:f")
LISTED = AllowedTargets.of([*(f"user_rewards:{name}" for name in _NAMES), *_OTHERS])
MakeItem = Callable[..., RewardInput]


@pytest.fixture
def item() -> MakeItem:
    def make(response: str, *, answer: Any = "42", environment_reward: float = 0.0) -> RewardInput:
        payload = json.dumps({"answer": answer})
        task = Task(task_id="t", environment="arithmetic", payload=payload)
        return RewardInput(
            episode_id="g/0", task=task, response=response, environment_reward=environment_reward
        )

    return make


@pytest.fixture
def listed() -> AllowedTargets:
    """What an operator lists in these tests."""
    return LISTED


@pytest.fixture
async def pool() -> AsyncIterator[ChildPool]:
    made = ChildPool(plain_children([FUNCTIONS]), FairQueue(2))
    yield made
    await made.close()


@pytest.fixture
def scorer(pool: ChildPool) -> Scorer:
    return Scorer(pool=pool, allowed=LISTED)
