"""The corpus of solved tasks in the memory of an allocator, for the transform `xrpo_seeds`.

An allocator knows tasks by position and answers by text, so that is what is kept: of the tasks that
were solved last, as many as a start can name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.methods.xrpo.transform import SEEDED
from paceline.plugins import MAX_NAMED_TASKS, GroupOutcome, Start

CORPUS = "solved"  # key of the memory
MAX_BYTES = 768  # of all answers as JSON, within the meta of a start


def remembered(
    memory: Mapping[str, Any], outcomes: Sequence[GroupOutcome], *, success: float = 0.5
) -> dict[str, Any]:
    """The change of the memory by the best answers to tasks that were solved.

    Rewards above `success` are successes. Answers that a start has no room for are left out.
    """
    solved: dict[int, str] = dict(memory.get(CORPUS, ()))
    for outcome in outcomes:
        best = max(outcome.rewards, default=0.0)
        answer = outcome.answers[outcome.rewards.index(best)] if best > success else ""
        if answer:
            solved.pop(outcome.task, None)  # so that it is the newest
            solved[outcome.task] = answer
    newest = list(solved.items())[-MAX_NAMED_TASKS:]
    while newest and len(json.dumps([answer for _, answer in newest])) > MAX_BYTES:
        newest.pop(0)
    return {CORPUS: [list(solution) for solution in newest]}


def seeded(memory: Mapping[str, Any], number: int) -> tuple[Start, ...]:
    """A wave of `number` episodes that see solved examples; a plain one if none is known."""
    solved: list[tuple[int, str]] = memory.get(CORPUS, [])
    tasks = tuple(task for task, _ in solved)
    meta = {"answers": [answer for _, answer in solved]} if solved else {}
    return (Start(SEEDED, meta=meta, tasks=tasks),) * number
