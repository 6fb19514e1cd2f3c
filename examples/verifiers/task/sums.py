"""An environment of verifiers in a folder of a job: sums of two numbers, in one turn."""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from datasets import Dataset

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.verifiers.tasks:VerifiersTasks",
    world="paceline.environments.verifiers.world:of_own_code",
)


def right(completion: list[Any], answer: str) -> float:
    """Whether the reply is the sum."""
    return float(completion[-1]["content"].strip() == answer)


def short(completion: list[Any]) -> float:
    """More for replies of fewer characters."""
    return 1.0 / (1 + len(completion[-1]["content"]))


def load_environment(rows: int = 500, most: int = 99) -> vf.Environment:
    """What `verifiers.load_environment("sums")` finds."""

    def rows_of(seed: int) -> Dataset:
        chance = random.Random(seed)
        pairs = [(chance.randint(0, most), chance.randint(0, most)) for _ in range(rows)]
        return Dataset.from_list(
            [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
        )

    return vf.SingleTurnEnv(
        dataset=rows_of(0),
        eval_dataset=rows_of(1),
        rubric=vf.Rubric(funcs=[right, short], weights=[1.0, 0.1]),
    )
