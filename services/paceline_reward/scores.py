"""Validates what reward functions return, and converts items and scores to JSON."""

from __future__ import annotations

import math
from typing import Any

from paceline.enums import ScoreStatus
from paceline.platform.text import MAX_NAME, encodable, is_name
from paceline.plugins import RewardInput, RewardTurn
from paceline.types import Score, Task

MAX_JSON_BYTES = 4 << 20  # of a score, as a process sends it
MAX_DETAIL = 500
MAX_PARTS = 100
MAX_REWARD = 1e12
"""Squares of rewards, and sums of them over a batch, are numbers of float32."""


def as_score(value: Any) -> Score:
    """The result of a reward function as a `Score`; an invalid one becomes an `infra_error`."""
    if not isinstance(value, Score):
        try:
            value = Score(reward=_number(value), parts={})
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            return infra_error(f"returned {_kind(value)}: {error}")
    try:
        reward = _number(value.reward)
        parts = {str(name): _number(part) for name, part in value.parts.items()}
        status = ScoreStatus(value.status)
    except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
        return infra_error(f"returned a Score with wrong fields: {error}")
    if (wrong := next((name for name in parts if not is_name(name)), None)) is not None:
        return infra_error(f"returned a part {wrong[:40]!r}: 1 to {MAX_NAME} printable characters")
    if len(parts) > MAX_PARTS:
        return infra_error(f"returned {len(parts)} parts; at most {MAX_PARTS} are allowed")
    if not (abs(reward) <= MAX_REWARD and all(map(math.isfinite, parts.values()))):
        return infra_error(
            f"returned {reward!r} with parts {parts!r}; rewards have to be finite numbers "
            f"from {-MAX_REWARD:g} to {MAX_REWARD:g}, and parts finite"
        )
    return Score(
        reward=reward,
        parts=parts,
        status=status,
        raw_answer=encodable(str(value.raw_answer)),
        normalised_answer=encodable(str(value.normalised_answer)),
        detail=encodable(str(value.detail))[:MAX_DETAIL],
    )


def _number(value: Any) -> float:
    """A number of Python, Decimal, or a scalar of NumPy or torch, which say that they are floats.

    Raises:
        TypeError: it is something else, e.g. an array, a text or None.
        OverflowError, ValueError, RuntimeError: it is a number that no float can hold.
    """
    is_number = hasattr(type(value), "__float__") and not isinstance(value, str)  # numpy.str_
    if not is_number or getattr(value, "ndim", 0) != 0:
        raise TypeError("neither a number nor a Score; a reward cannot abstain or score several")
    return float(value)


def _kind(value: Any) -> str:
    """The name of a value's type, with its module if it is not one of Python's own."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def infra_error(detail: str) -> Score:
    """The score of an item that could not be scored."""
    status = ScoreStatus.INFRA_ERROR
    return Score(reward=0.0, parts={}, status=status, detail=encodable(detail)[:MAX_DETAIL])


def timed_out(detail: str) -> Score:
    """The score of an item whose response took more computation than it may."""
    detail = encodable(detail)[:MAX_DETAIL]
    return Score(reward=0.0, parts={}, status=ScoreStatus.TIMEOUT, detail=detail)


def item_to_json(item: RewardInput) -> dict[str, Any]:
    """An item as JSON."""
    task = item.task
    found: dict[str, Any] = {
        "episode_id": item.episode_id,
        "task": [task.task_id, task.environment, task.payload, task.seed, task.domain],
        "response": item.response,
        "environment_reward": item.environment_reward,
        "truncated": item.truncated,
        "turns": [[turn.text, turn.reward, turn.num_tokens] for turn in item.turns],
        "max_tokens": item.max_tokens,
        "parts": dict(item.parts),
    }
    if item.variant or item.variant_meta:
        found |= {"variant": item.variant, "variant_meta": dict(item.variant_meta)}
    return found


def item_from_json(raw: dict[str, Any]) -> RewardInput:
    """An item from JSON."""
    turns = tuple(RewardTurn(*turn) for turn in raw["turns"])
    fields: dict[str, Any] = raw | {"task": Task(*raw["task"]), "turns": turns}
    return RewardInput(**fields)


def score_to_json(score: Score) -> dict[str, Any]:
    """A score as JSON."""
    return {
        "reward": score.reward,
        "parts": score.parts,
        "status": score.status,
        "raw_answer": str(score.raw_answer),
        "normalised_answer": str(score.normalised_answer),
        "detail": str(score.detail)[:MAX_DETAIL],
    }


def score_from_json(raw: dict[str, Any]) -> Score:
    """A score from JSON, validated, as user code could have written it."""
    return as_score(Score(**raw))
