"""Contract tests for transforms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.enums import Purpose
from paceline.plugins import MAX_PICK_BYTES, Message, Observation, TransformContext, Variant
from paceline.testing.common import expect, expect_type, resolved
from paceline.types import Task

SEEDS = range(32)
MAX_S = 60.0  # of one call, as `tasks.step_timeout_s` of a job without its own
QUESTION = "12+34="


def context(
    *,
    seed: int = 7,
    purpose: Purpose = Purpose.TRAIN,
    variant: str = "",
    meta: Mapping[str, Any] | None = None,
    tasks: Sequence[Task] = (),
) -> TransformContext:
    """The context of a task with a question and an answer."""
    return TransformContext(task(QUESTION, "46"), purpose, seed, variant, meta or {}, tuple(tasks))


def task(question: str, answer: str) -> Task:
    """A task of arithmetic."""
    payload = json.dumps({"question": question, "answer": answer})
    return Task(f"task {question}", "arithmetic", payload)


def fulfils_the_contract(
    plugin: Any,
    options: Mapping[str, Any] | None = None,
    *,
    observations: Sequence[Observation] = (),
    contexts: Sequence[TransformContext] = (),
) -> list[Variant]:
    """Check what it makes of several prompts, and that it makes the same of them every time.

    Args:
        plugin: called as `plugin(observation, context, **options)`.
        options: of the transform.
        observations: what to ask with; a question as a message, as text and after a system message
            if empty.
        contexts: besides those of groups with many seeds, in training and evaluation.

    Returns:
        The variants of the last observation, of seeds 0 to 31 in training.
    """
    return asyncio.run(
        _checked(resolved("transforms", plugin), dict(options or {}), observations, contexts)
    )


async def _checked(
    call: Any,
    options: dict[str, Any],
    observations: Sequence[Observation],
    contexts: Sequence[TransformContext],
) -> list[Variant]:
    every = [context(seed=seed) for seed in SEEDS]
    every += [replace(each, purpose=Purpose.EVAL) for each in every[:4]]
    every += [replace(each, variant="other", meta={"a": 1}) for each in every[:4]]
    every += contexts
    found: list[Variant] = []
    for observation in observations or _observations():
        found = [await _variant(call, observation, each, options) for each in every]
        # In another order and at the same time, as on another worker.
        calls = [_variant(call, observation, each, options) for each in reversed(every)]
        again = await asyncio.gather(*calls)
        for each, first, second in zip(every, found, reversed(again), strict=True):
            expect(
                first == second,
                f"{first} once, then {second}: an answer must depend on nothing but the "
                f"arguments (seed {each.seed}, {each.purpose})",
            )
    return found[: len(SEEDS)]


async def _variant(
    call: Any, observation: Observation, given: TransformContext, options: dict[str, Any]
) -> Variant:
    async with asyncio.timeout(MAX_S):
        found = await call(observation, given, **options)
    expect_type(found, Variant, "the result")
    expect(found.messages or found.text, "the prompt is empty")
    expect(
        bool(found.messages) == bool(observation.messages),
        "it has messages where the observation has none, or the other way round",
    )
    for message in found.messages:
        expect_type(message, Message, "a message")
    expect(found.train_as in {"sampled", "original"}, f"train_as is {found.train_as!r}")
    told = json.dumps({"variant": found.name, "meta": dict(found.meta)}, allow_nan=False)
    expect(len(told) <= MAX_PICK_BYTES, f"name and meta have more than {MAX_PICK_BYTES} bytes")
    return found


def _observations() -> list[Observation]:
    asked = Message("user", QUESTION)
    return [
        Observation(text=QUESTION),
        Observation((Message("system", "You add numbers."), asked)),
        Observation((asked,), text=QUESTION),
    ]
