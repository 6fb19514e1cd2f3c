"""Outcome-based exploration (arXiv 2509.06941, sections 3 and 4)."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.methods.parts.group_statistics import Floats, members
from paceline.methods.parts.previous import advantages_before
from paceline.plugins import Advantages, Context, EpisodeBatch, GroupOutcome

MAX_ANSWERS = 64  # kept of a task; the rarest leave first
_LONGEST = 24  # characters of an answer as it is; longer ones are hashed


def outcome_exploration(
    batch: EpisodeBatch,
    context: Context,
    *,
    coef: float,
    bonus: str = "ucb_con",
    constant: float = 0.5,
    correct: float = 0.5,
) -> Advantages:
    """The advantages of the part before plus `coef` x the bonus of the answer, [N] or [T].

    Memory: by task, how often each of its answers was seen. An episode without an answer gets no
    bonus.

    Raises:
        InvalidError: no part comes before.
    """
    before, groups = advantages_before(batch), members(batch.groups)
    answers = [_key(answer) for answer in batch.answers]
    bonuses = np.zeros(len(answers))
    rare = np.array(
        [_rarity(context.memory, t, a) for t, a in zip(batch.tasks.tolist(), answers, strict=True)]
    )
    for own in groups:
        if (batch.rewards[own] > correct).all():
            continue
        named = [answers[place] for place in own]
        bonuses[own] = _bonus(bonus, rare[own], named, constant) * [
            bool(answer) for answer in named
        ]
    spread = bonuses if len(before) == len(bonuses) else np.repeat(bonuses, batch.lengths)
    changed = _count_answers(context.memory, context.outcomes)
    distinct = sum(len({answers[place] for place in own} - {""}) for own in groups)
    notes = {"distinct_answers": distinct / max(len(groups), 1)}
    return Advantages(before + coef * spread, memory=changed, notes=notes)


def _bonus(kind: str, rare: Floats, answers: Sequence[str], constant: float) -> Floats:
    if kind == "naive":
        return rare
    if kind == "ucb_con":
        return rare - constant
    if kind == "ucb_mean":
        return rare - (rare.sum() - rare) / max(len(rare) - 1, 1)
    counts = Counter(answers)
    equal = np.array([counts[answer] - 1 for answer in answers], np.float64)
    return -equal / len(answers)


def _rarity(memory: Mapping[str, Any], task: int, answer: str) -> float:
    seen = (memory.get(str(task)) or {}).get(answer, 0) if answer else 0
    return min(1.0, 1.0 / np.sqrt(seen)) if seen else 1.0


def _count_answers(
    memory: Mapping[str, Any], outcomes: Sequence[GroupOutcome]
) -> dict[str, dict[str, int]]:
    changed: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        task = str(outcome.task)
        counts = changed.setdefault(task, dict(memory.get(task) or {}))
        for answer in filter(None, map(_key, outcome.answers)):
            counts[answer] = counts.get(answer, 0) + 1
        if len(counts) > MAX_ANSWERS:
            often = heapq.nlargest(MAX_ANSWERS, counts, key=lambda answer: (counts[answer], answer))
            changed[task] = {answer: counts[answer] for answer in sorted(often)}
    return changed


def _key(answer: str) -> str:
    """A short name of an answer, the same for equal ones."""
    if len(answer) <= _LONGEST and answer.isascii() and answer.isprintable():
        return answer
    return "#" + hashlib.sha256(answer.encode()).hexdigest()[: _LONGEST - 1]
