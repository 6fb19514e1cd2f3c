"""XRPO's in-context seeds: solved examples before a task that all rollouts failed.

The allocator begins a wave of variant `seeded`, whose starts name solved tasks (`Start.tasks`) and
their answers in the same order (`meta: {answers: [...]}`); the most similar ones are shown. The
paper finds them with an embedding model; here similarity is that of the sets of words, which needs
no model and is the same on every worker.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from paceline.enums import Purpose
from paceline.methods.parts.prompts import rewritten
from paceline.methods.xrpo import XrpoSeedsOptions
from paceline.plugins import Observation, TransformContext, Variant
from paceline.types import Task

SEEDED = "seeded"
ZERO_SHOT = "zero_shot"
_WORD = re.compile(r"\w+|[^\w\s]")


async def xrpo_seeds(
    observation: Observation, context: TransformContext, **options: Any
) -> Variant:
    """The question after K solved examples (arXiv 2510.06672).

    Without solved tasks the prompt stays as it is, and its variant is `zero_shot`.
    """
    parsed = XrpoSeedsOptions.model_validate(options)
    if context.variant != SEEDED or context.purpose is not Purpose.TRAIN:
        return Variant(observation.messages, observation.text)
    own = _field(context.task, parsed.question_field)
    neighbours = nearest(own, _solved(context, parsed), parsed.examples)
    if not neighbours:
        return Variant(observation.messages, observation.text, name=ZERO_SHOT)
    shown = "".join(_shown(question, answer, parsed) for _, question, answer in neighbours)
    variant = rewritten(observation, lambda question: shown + question)
    names = [task.task_id for task, _, _ in neighbours]
    return replace(variant, name=SEEDED, meta={"examples": names}, train_as=parsed.train_as)


def nearest(
    question: str, solved: list[tuple[Task, str, str]], number: int
) -> list[tuple[Task, str, str]]:
    """The `number` most similar ones, the most similar last; among equals the first ones."""
    words = _words(question)

    def similarity(solution: tuple[Task, str, str]) -> float:
        others = _words(solution[1])
        return len(words & others) / max(len(words | others), 1)

    return sorted(solved, key=similarity, reverse=True)[:number][::-1]


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.casefold()))


def _solved(context: TransformContext, options: XrpoSeedsOptions) -> list[tuple[Task, str, str]]:
    """Solved tasks with question and answer, without the task itself, whose answer they tell."""
    answers: list[Any] = list(context.meta.get("answers", ()))
    own = _field(context.task, options.question_field)
    solutions: dict[str, tuple[Task, str, str]] = {}
    for task, answer in zip(context.tasks, answers, strict=False):
        question = _field(task, options.question_field)
        if question and question != own and task.task_id != context.task.task_id:
            solutions.setdefault(question, (task, question, str(answer)))
    return list(solutions.values())


def _shown(question: str, answer: str, options: XrpoSeedsOptions) -> str:
    size = options.max_chars
    return options.example.replace("{answer}", answer[:size]).replace("{question}", question[:size])


def _field(task: Task, name: str) -> str:
    payload: Any = json.loads(task.payload)
    value: Any = payload.get(name, "") if isinstance(payload, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return value if isinstance(value, str) else json.dumps(value)
