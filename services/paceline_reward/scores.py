"""What reward functions return, checked and as JSON."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from typing import Any

from paceline.interfaces import RewardInput
from paceline.types import Score, Task, VerifierStatus

MAX_DETAIL = 500


def as_score(value: Any) -> Score:
    """What a reward function returned, as a `Score`; anything unusable is an `infra_error`."""
    if isinstance(value, Real):
        try:
            value = Score(reward=float(value), parts={})
        except OverflowError as error:
            return infra_error(f"returned {type(value).__name__}: {error}")
    if not isinstance(value, Score):
        return infra_error(f"returned {type(value).__name__}, neither a number nor a Score")
    try:
        reward = float(value.reward)
        parts = {_text(name): float(points) for name, points in value.parts.items()}
        status = VerifierStatus(value.status)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        return infra_error(f"returned a Score with wrong fields: {error}")
    if not math.isfinite(reward) or not all(map(math.isfinite, parts.values())):
        return infra_error(f"returned {reward!r} with parts {parts!r}, not finite")
    return replace(
        value,
        reward=reward,
        parts=parts,
        status=status,
        raw_answer=_text(value.raw_answer),
        normalised_answer=_text(value.normalised_answer),
        detail=_text(value.detail)[:MAX_DETAIL],
    )


def _text(value: Any) -> str:
    """A text that can be sent: without halves of surrogate pairs."""
    return str(value).encode(errors="replace").decode()


def infra_error(detail: str) -> Score:
    """A score that means nothing."""
    status = VerifierStatus.INFRA_ERROR
    return Score(reward=0.0, parts={}, status=status, detail=detail[:MAX_DETAIL])


def item_to(item: RewardInput) -> dict[str, Any]:
    """An item as JSON."""
    task = item.task
    return {
        "episode_id": item.episode_id,
        "task": [task.task_id, task.environment, task.payload, task.seed, task.domain],
        "response": item.response,
        "environment_reward": item.environment_reward,
        "truncated": item.truncated,
    }


def item_from(raw: dict[str, Any]) -> RewardInput:
    """An item from JSON."""
    fields: dict[str, Any] = raw | {"task": Task(*raw["task"])}
    return RewardInput(**fields)


def score_to(score: Score) -> dict[str, Any]:
    """A score as JSON."""
    return {
        "reward": score.reward,
        "parts": score.parts,
        "status": score.status,
        "raw_answer": str(score.raw_answer),
        "normalised_answer": str(score.normalised_answer),
        "detail": str(score.detail)[:MAX_DETAIL],
    }


def score_from(raw: dict[str, Any]) -> Score:
    """A score from JSON, checked again: user code could have written it."""
    return as_score(Score(**raw))
