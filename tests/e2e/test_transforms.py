"""Transforms through all services: templates of groups, and examples for tasks that failed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.enums import Purpose
from paceline.types import Trajectory
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# The tiny model reads digits and signs only.
TEMPLATES = [
    {"name": "plain", "text": "{question}"},
    {"name": "tagged", "text": "0+{question}", "tags": ["1", "2", "3", "4"]},
    {"name": "begun", "text": "{question}0", "tags": ["5", "6", "7"], "answer": "line"},
]


def run(platform: Any, job: dict[str, Any]) -> tuple[list[Trajectory], list[dict[str, float]]]:
    """Everything that the job has trained or evaluated, and the rows of its training."""
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        assert client.verify(job_id).ok
        found = [
            each
            for purpose in (Purpose.TRAIN, Purpose.EVAL)
            for each in client.list_trajectories(
                job_id, page_size=200, purpose=purpose
            ).trajectories
        ]
        rows = [row for row in client.list_metrics(job_id).rows if row.kind is Purpose.TRAIN]
    return found, [row.values for row in rows]


def augmented(tiny_job: Callable[..., dict[str, Any]], name: str) -> dict[str, Any]:
    return tiny_job(
        name=name,
        stop={"steps": 2},
        tasks={
            "environment": "arithmetic",
            "options": {"digits": 1},
            "transform": {"kind": "prompt_augmentation", "templates": TEMPLATES},
        },
        eval={"every": 2, "tasks": 4, "options": {"split": "heldout"}},
        reward=[{"kind": "template_answer"}, {"kind": "template_format", "weight": 0.5}],
        experience={"batch_groups": 8, "group_size": 2, "max_staleness": 0, "filters": []},
    )


def test_a_group_has_one_template_and_the_format_of_its_reward(
    platform: Any, tiny_job: Callable[..., dict[str, Any]]
) -> None:
    templates: list[dict[str, str]] = []
    for name in ("templates", "templates-again"):
        found, rows = run(platform, augmented(tiny_job, name))
        assert len(rows) == 2
        of_groups: dict[str, set[str]] = {}
        for each in found:
            of_groups.setdefault(each.group_id, set()).add(each.provenance.prompt_variant)
            tags = next(t for t in TEMPLATES if t["name"] == each.provenance.prompt_variant)
            wanted: Any = tags.get("tags", [])
            there = [each.response_text.count(tag) == 1 for tag in wanted]
            share = sum(there) / len(there) if there else 1.0
            assert each.score.parts["template_format"] == pytest.approx(share)
        assert all(len(names) == 1 for names in of_groups.values())
        evals = {e.provenance.prompt_variant for e in found if e.purpose is Purpose.EVAL}
        assert evals == {"plain"}
        trained = [each for each in found if each.purpose is Purpose.TRAIN]
        assert len({each.provenance.prompt_variant for each in trained}) > 1
        templates.append({each.task_id: each.provenance.prompt_variant for each in trained})
    assert templates[0] == templates[1]  # the same seed draws the same


def test_failed_tasks_are_tried_again_after_solved_examples(
    platform: Any, tiny_job: Callable[..., dict[str, Any]]
) -> None:
    """They are trained after the plain prompt, and marked so."""
    transform = {"kind": "xrpo_seeds", "examples": 1, "example": "{question}{answer} "}
    job = tiny_job(
        name="seeded",
        stop={"steps": 8},
        tasks={
            "environment": "arithmetic",
            "options": {"digits": 1},
            "transform": {**transform, "train_as": "original"},
        },
        eval=None,
        reward=[{"kind": "lenient"}],
        experience={
            "batch_groups": 4,
            "group_size": 2,
            "max_staleness": 0,  # each step begins with what those before it have solved
            "filters": [],
            "allocator": {"kind": "seeding"},
        },
    )
    found, rows = run(platform, job)
    assert all(math.isfinite(row["loss"]) for row in rows)
    seeded = [each for each in found if each.provenance.prompt_variant == "seeded"]
    assert seeded
    plain = {
        each.group_id: each.transcripts[0].tokens[: each.transcripts[0].spans[0].end]
        for each in found
        if not each.provenance.prompt_variant
    }
    for each in seeded:
        transcript = each.transcripts[0]
        assert transcript.original_prompt
        assert transcript.tokens[: transcript.spans[0].end] == plain[each.group_id]
        assert '"examples"' in each.provenance.variant_meta
