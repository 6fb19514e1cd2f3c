"""Contract tests for rewards."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.plugins import Reward, RewardInput
from paceline.testing.common import expect, is_number, resolved
from paceline.types import Score, Task

# Degenerate responses that policies do produce.
STRANGE = ("", " ", "\0", "\ud7ff\u202e\U0001f642", "{" * 1000, "9" * 5000, "nan", "\n" * 100)


def item(
    response: str,
    *,
    environment_reward: float = 0.0,
    truncated: bool = False,
    variant_meta: Mapping[str, Any] | None = None,
    **payload: Any,
) -> RewardInput:
    """A response to a task whose payload has these fields."""
    task = Task(task_id="contract", environment="contract", payload=json.dumps(payload))
    return RewardInput(
        "contract-1.0/0",
        task,
        response,
        environment_reward,
        truncated,
        variant_meta=variant_meta or {},
    )


def fulfils_the_contract(
    plugin: str | Reward,
    options: Mapping[str, Any] | None = None,
    *,
    items: Sequence[RewardInput],
    rewards: Sequence[float] | None = None,
) -> None:
    """Check for finite, repeatable scores, also for degenerate responses to each task.

    `rewards` are the expected scores of `items`.
    """
    reward: Reward = resolved("rewards", plugin)
    given = dict(options or {})
    expect(items, "pass at least one item")
    found = [_points(reward, each, given) for each in items]
    again = [_points(reward, each, given) for each in reversed(items)]
    expect(found == again[::-1], f"the same items score {found}, then {again[::-1]}")
    if rewards is not None:
        expect(found == list(rewards), f"the items score {found}, not {list(rewards)}")
    for text in STRANGE:
        strange = replace(items[0], episode_id="contract-1.0/1", response=text, truncated=True)
        _points(reward, strange, given)


def _points(reward: Reward, each: RewardInput, options: Mapping[str, Any]) -> float:
    value = reward(each, **options)
    if inspect.isawaitable(value):
        value = asyncio.run(_finished(value))
    if isinstance(value, Score):
        wrong = {name: points for name, points in value.parts.items() if not is_number(points)}
        expect(not wrong, f"parts that are not finite numbers: {wrong} for {each.response!r}")
        value = value.reward
    expect(is_number(value), f"{value!r} for {each.response!r}; expected a finite number or Score")
    return float(value)


async def _finished(value: Any) -> Any:
    return await value
