from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.fair_queue import FairQueue
from paceline.plugins import RewardInput
from paceline.types import Task
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.scorer import Scorer

FUNCTIONS = Path(__file__).parent / "functions"
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
async def pool() -> AsyncIterator[ChildPool]:
    made = ChildPool(plain_children([FUNCTIONS]), FairQueue(2))
    yield made
    await made.close()


@pytest.fixture
def scorer(pool: ChildPool) -> Scorer:
    return Scorer(pool=pool)
