"""Reward `length`: short answers, or answers of a given length."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.errors import InvalidError
from paceline.plugins import RewardInput, declares
from paceline.types import Score

Shape = Literal["cosine", "linear", "target", "budget"]
Tokens = Annotated[int, Field(gt=0)]
Points = Annotated[float, Field(ge=-100, le=100)]
Pair = tuple[Points, Points]
_SLOPE = 3e-4


@declares(inline=True)
def length(
    item: RewardInput,
    *,
    shape: Shape = "cosine",
    tokens: Tokens | None = None,
    tokens_field: str = "",
    right: Pair = (1.0, 0.5),
    wrong: Pair = (-1.0, -0.5),
    exceeded: Points | None = None,
    shortest: Annotated[int, Field(ge=0)] = 0,
    slope: Annotated[float, Field(gt=0, le=1)] = _SLOPE,
    success: float = 1.0,
) -> Score:
    """A reward for the tokens that the policy has written, n, over all turns.

    With L for `tokens`:

    * `cosine`: from `right[0]` at n = 0 to `right[1]` at L for right answers, from `wrong[0]` to
      `wrong[1]` for wrong ones, along half a cosine; above L it is `exceeded`, or else the value
      at L (arXiv 2502.03373).
    * `linear`: 0.5 - (n - shortest) / (L - shortest), between -0.5 and 0.5, and at most 0 for
      wrong answers (Kimi k1.5, arXiv 2501.12599, whose bounds are those of the group).
    * `target`: -slope |L - n| (L1-Exact, arXiv 2503.04697).
    * `budget`: slope (L - n) + 0.5, between 0 and 1, and 0 for wrong answers (L1-Max).

    An answer is right if all parts that the job lists as `after` of this one have at least
    `success`; without any, all answers are.

    Args:
        item: its tokens count, and the parts before.
        shape: of the reward.
        tokens: L; null: the job's `sampling.max_tokens`.
        tokens_field: L is in this field of the task's payload.
        right: for `cosine`.
        wrong: for `cosine`.
        exceeded: for `cosine`.
        shortest: for `linear`.
        slope: per token, for `target` and `budget`.
        success: reward of the other parts from which an answer is right.

    Raises:
        InvalidError: the payload has no such field, or not a number above 0 in it.
    """
    limit = _limit(item, tokens, tokens_field)
    is_right = all(reward >= success for reward in item.parts.values())
    written = sum(turn.num_tokens for turn in item.turns)
    if shape == "cosine":
        reward = _cosine(written, limit, right if is_right else wrong, exceeded)
    elif shape == "linear":
        reward = 0.5 - (written - shortest) / max(limit - shortest, 1)
        reward = min(max(reward, -0.5), 0.5 if is_right else 0.0)
    elif shape == "target":
        reward = -slope * abs(limit - written)
    else:
        reward = min(max(slope * (limit - written) + 0.5, 0.0), 1.0) if is_right else 0.0
    return Score(reward=reward, parts={})


def _cosine(written: int, limit: int, ends: Pair, exceeded: float | None) -> float:
    if written > limit and exceeded is not None:
        return exceeded
    first, last = ends
    share = min(written / limit, 1.0)
    return last + 0.5 * (first - last) * (1 + math.cos(share * math.pi))


def _limit(item: RewardInput, tokens: int | None, field: str) -> int:
    if not field:
        limit: Any = tokens or item.max_tokens
    else:
        payload: Any = json.loads(item.task.payload)
        limit = payload.get(field) if isinstance(payload, dict) else None
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 1 <= limit < 1e9:
        where = f"payload of task {item.task.task_id!r}: {field!r}" if field else "tokens"
        raise InvalidError(f"{where} has to be a number of tokens, not {limit!r}")
    return int(limit)
