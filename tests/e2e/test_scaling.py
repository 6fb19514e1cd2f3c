"""A job is scaled from one rollout worker to three and back during training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.enums import WorkerKind
from paceline.front.client.client import Client
from paceline.front.local.supervisor import Local
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
GROUPS, SIZE = 4, 6
# Everything that is admitted is to run at once until the first step; afterwards one is enough.
SCALING = {
    "period_s": 0.5,
    "warmup_s": 0.0,
    "smooth_s": 2.0,
    "scale_up_cooldown_s": 0.0,
    "scale_down_stabilization_s": 10.0,
    "max_scale_down": 0.1,
    "sync_wait": 0.995,
}
Until = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Local]:
    made = Local(
        tmp_path / "site", http_port=0, options={WorkerKind.CONTROLLER: {"scaling": SCALING}}
    )
    with made:
        yield made


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Rewards are held back until this file exists."""
    return tmp_path / "gate"


@pytest.fixture
def job_of(tiny_job: Callable[..., dict[str, Any]], gate: Path) -> Callable[..., dict[str, Any]]:
    """A synchronous job."""
    reward = {
        "kind": "gated",
        "gate": str(gate),
        "pattern": "^[^7]{0,12}$",
        "timeout_s": 600.0,
    }

    def make(name: str, *, steps: int, **rollout: Any) -> dict[str, Any]:
        job = tiny_job(
            name=name,
            eval=None,
            tasks={"environment": "arithmetic", "options": {"digits": 1}, "seed": 11},
            sampling={"max_tokens": 40, "max_context": 56, "on_truncation": "score"},
            reward=[reward],
            # What is learned soon has no variance left; steps are to go on at the same pace.
            experience={
                "batch_groups": GROUPS,
                "group_size": SIZE,
                "max_staleness": 0,
                "filters": [],
                # An environment worker that has to wait for the processor loses nothing either.
                "lease_s": 60.0,
            },
            rollout={"activation": "at_boundary", **rollout},
            # Workers are given up while they have nothing to do, so training takes a while too:
            # a sequence at a time.
            trainer={
                "optimizer": {"lr": 3e-4},
                "checkpoint": {"every": 1},
                "tokens_per_micro_batch": 56,
            },
            stop={"steps": steps},
        )
        for part in ("model", "trainer"):
            # In bfloat16, tokens depend on the rows that are computed together.
            job[part] = {**job[part], "dtype": "float32"}
        return job

    return make


def rollouts(site: Local, job_id: str) -> list[str]:
    return sorted(path.stem for path in (site.run_dir / "processes").glob(f"rollout-{job_id}-*"))


def holders(client: Client, job_id: str) -> list[str]:
    """Rollout workers that have weights to sample with."""
    return [one.worker_id for one in client.list_weights(job_id).holders if one.worker_id]


def trained(site: Local, job_id: str) -> list[dict[str, Any]]:
    """Trained episodes, in the order of their batches."""
    folder = site.run_dir / "jobs" / job_id / "trajectories"
    files = [*sorted(folder.glob("step-*.jsonl")), *folder.glob("final.jsonl")]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def made(episode: dict[str, Any]) -> tuple[Any, ...]:
    """The results that must not depend on the number of workers."""
    (transcript,) = episode["transcripts"]
    return (
        int(episode["group_id"].split(".")[1]),
        episode["index"],
        episode["sampling"]["seed"],
        transcript["tokens"],
        episode["score"]["reward"],
    )


def makers(episodes: list[dict[str, Any]]) -> set[str]:
    return {name for one in episodes for name in one["provenance"]["rollout_workers"]}


def test_learning_does_not_change_while_it_scales(
    site: Local, job_of: Callable[..., dict[str, Any]], gate: Path, until: Until
) -> None:
    bounds = {"min_replicas": 1, "max_replicas": 3}
    with Client(site.url, token=site.token) as client:
        # One request at a time: what is admitted for the first step wants more than one worker.
        job = job_of("scaled", steps=500, scaling=bounds, max_concurrent=1)
        job_id = client.submit(job).status.job_id
        # The first step waits for its rewards meanwhile; afterwards one worker is enough.
        until(lambda: len(holders(client, job_id)) == 3, "never three workers", PATIENCE_S)
        gate.touch()
        until(lambda: len(rollouts(site, job_id)) == 1, "never one worker again", PATIENCE_S)
        step = client.get(job_id).status.step
        until(
            lambda: client.get(job_id).status.step >= step + 2,
            "no step with one worker",
            PATIENCE_S,
        )
        client.cancel(job_id)
        client.wait(job_id, timeout_s=PATIENCE_S)
        report = client.verify(job_id)
        assert report.ok, report.problems
        assert "stale" not in report.dropped, "something was sampled with old weights"
        scaled = trained(site, job_id)
        assert len(makers(scaled)) == 3, "not all of them sampled"
        assert len(scaled) % (GROUPS * SIZE) == 0
        alone_id = client.submit(
            job_of("alone", steps=len(scaled) // (GROUPS * SIZE))
        ).status.job_id
        status = client.wait(alone_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", status.reason
    alone = trained(site, alone_id)
    assert len(makers(alone)) == 1
    assert [made(episode) for episode in scaled] == [made(episode) for episode in alone]
    attempts = {episode["attempt"] for episode in scaled}
    assert attempts == {1}, "a worker that leaves loses nothing and costs no attempt"
