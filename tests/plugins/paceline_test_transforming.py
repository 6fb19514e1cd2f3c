"""Transforms that rewrite, hang and fail."""

import asyncio
from dataclasses import replace
from typing import Any, Literal

from paceline.errors import UnavailableError
from paceline.methods.parts.prompts import rewritten
from paceline.plugins import Observation, RewardInput, TransformContext, Variant
from paceline.types import Score

CALLS: list[tuple[int, str]] = []  # seed and variant of each call in this process


async def prefixed(
    observation: Observation,
    context: TransformContext,
    *,
    prefix: str = "h",
    train_as: Literal["sampled", "original"] = "sampled",
    pause_s: float = 0.0,
) -> Variant:
    """Begin the question with a word, once more for each letter of the start's variant."""
    CALLS.append((context.seed, context.variant))
    await asyncio.sleep(pause_s)
    before = prefix + "q" * len(context.variant)
    found = rewritten(observation, lambda question: before + question)
    meta = {"prefix": before, "tasks": [task.task_id for task in context.tasks]}
    return replace(found, name=f"{prefix}-{context.variant}", meta=meta, train_as=train_as)


async def faulty(
    observation: Observation, context: TransformContext, *, deed: str = "raise"
) -> Any:
    """Fail in one of several ways."""
    del context
    if deed == "hang":
        await asyncio.sleep(3600.0)
    if deed == "raise":
        raise ZeroDivisionError("no prompt today")
    if deed == "unreachable":
        raise UnavailableError("the index is down")
    if deed == "large":
        return Variant(text="12", meta={"a": "x" * 2000})
    if deed == "empty":
        return Variant()
    return observation


def lenient(item: RewardInput) -> Score:
    """1 for a response that begins with a small digit, which is its answer."""
    answer = item.response[:1]
    return Score(float(answer in set("01234")), {}, normalised_answer=answer)


class Drifting:
    """Answers differently every time."""

    def __init__(self) -> None:
        self._calls = 0

    async def __call__(self, observation: Observation, context: TransformContext) -> Variant:
        """The prompt with a number."""
        del context
        self._calls += 1
        return rewritten(observation, lambda question: f"{self._calls} {question}")
