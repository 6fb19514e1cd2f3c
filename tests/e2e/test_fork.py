"""A fork trains with the losses that its parent has from the same checkpoint on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.front.client.client import Client
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 8


def losses(client: Client, job_id: str) -> dict[int, float]:
    """Loss by step; of a step that was trained again, the last one."""
    rows = client.list_metrics(job_id, page_size=500).rows
    return {row.step: float(row.values["loss"]) for row in rows if row.kind == "train"}


def test_parent_and_fork_go_on_with_the_same_losses(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], until: Callable[..., None]
) -> None:
    job = tiny_job(
        name="parent",
        eval=None,
        # Rewards of random answers that differ, so that there is something to learn.
        sampling={"max_tokens": 40, "max_context": 56, "on_truncation": "score"},
        reward=[{"kind": "regex", "pattern": "^[^7]{0,12}$"}],
        experience={"batch_groups": 4, "group_size": 4, "filters": [], "max_staleness": 0},
        rollout={"activation": "at_boundary"},
        trainer={"optimizer": {"lr": 1e-3}, "checkpoint": {"every": 2}, "dtype": "float32"},
        stop={"steps": STEPS},
    )
    job["model"] = {**job["model"], "dtype": "float32"}
    with platform.client() as client:
        parent = client.submit(job).status.job_id
        until(lambda: client.get(parent).status.step >= 3, "no steps", PATIENCE_S)
        client.pause(parent)
        until(lambda: client.get(parent).status.state == "paused", "is not paused", PATIENCE_S)
        spec = client.get(parent).spec | {"name": "child", "fork": {"job": parent}}
        child = client.submit(spec).status.job_id
        fork = client.get(child).spec["fork"]
        assert fork["job"] == parent
        assert 3 <= fork["step"] < STEPS
        assert len(fork["digest"]) == 64
        client.resume(parent)
        for job_id in (parent, child):
            status = client.wait(job_id, timeout_s=PATIENCE_S).status
            assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
            report = client.verify(job_id)
            assert report.ok, report.problems
        first, second = losses(client, parent), losses(client, child)
        assert first.keys() == second.keys() == set(range(1, STEPS + 1))
        for step in range(fork["step"] + 1, STEPS + 1):
            assert second[step] == pytest.approx(first[step], rel=1e-4, abs=1e-6), step
        assert len({round(loss, 9) for loss in first.values()}) > 1
