"""Validates what reward functions return, and converts items and scores to JSON."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from paceline.enums import ScoreStatus
from paceline.plugins import RewardInput, RewardTurn
from paceline.types import Score, Task

MAX_DETAIL = 500


def as_score(value: Any) -> Score:
    """The result of a reward function as a `Score`; an invalid one becomes an `infra_error`."""
    if isinstance(value, Real):
        try:
            value = Score(reward=float(value), parts={})
        except OverflowError as error:
            return infra_error(f"returned {type(value).__name__}: {error}")
    if not isinstance(value, Score):
        return infra_error(f"returned {type(value).__name__}, neither a number nor a Score")
    try:
        reward = float(value.reward)
        parts = {_text(name): float(part) for name, part in value.parts.items()}
        status = ScoreStatus(value.status)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        return infra_error(f"returned a Score with wrong fields: {error}")
    if not math.isfinite(reward) or not all(map(math.isfinite, parts.values())):
        return infra_error(f"returned {reward!r} with parts {parts!r}, not finite")
    return Score(
        reward=reward,
        parts=parts,
        status=status,
        raw_answer=_text(value.raw_answer),
        normalised_answer=_text(value.normalised_answer),
        detail=_text(value.detail)[:MAX_DETAIL],
    )


def _text(value: Any) -> str:
    """A string that can be encoded as UTF-8: without lone surrogates."""
    return str(value).encode(errors="replace").decode()


def infra_error(detail: str) -> Score:
    """The score of an item that could not be scored."""
    status = ScoreStatus.INFRA_ERROR
    return Score(reward=0.0, parts={}, status=status, detail=detail[:MAX_DETAIL])


def timed_out(detail: str) -> Score:
    """The score of an item whose response took more computation than it may."""
    return Score(reward=0.0, parts={}, status=ScoreStatus.TIMEOUT, detail=detail[:MAX_DETAIL])


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
