"""Waits between two snapshots are followed to their roots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.enums import JobState, WorkerKind
from paceline.front.api.activity import Activity, JobActivity, ProcessActivity
from paceline.front.api.blame import attribute
from paceline.types import JobStatus

SECONDS = 10.0


def status(name: str = "j", state: JobState = JobState.RUNNING) -> JobStatus:
    return JobStatus(job_id=name, name=name, tenant="default", state=state)


def after(job_waits: dict[str, float], **processes: dict[str, Any]) -> tuple[Activity, Activity]:
    """Two snapshots of one job; what each kind of process spent in the ten seconds between."""
    before = Activity(
        100.0,
        (JobActivity(status(), waits_s=dict.fromkeys(job_waits, 7.0), tokens=1000),),
        tuple(ProcessActivity(kind, WorkerKind(kind), capacity=8.0) for kind in processes),
    )
    waits_s = {name: 7.0 + seconds for name, seconds in job_waits.items()}
    now = Activity(
        110.0,
        (JobActivity(status(), waits_s=waits_s, tokens=3000),),
        tuple(
            ProcessActivity(kind, WorkerKind(kind), capacity=8.0, **spent)
            for kind, spent in processes.items()
        ),
    )
    return before, now


@pytest.mark.parametrize(
    ("job_waits", "processes", "bottleneck", "score"),
    [
        # The trainer has no batch for 8 of 10 s; six of eight open episodes are at rollout.
        (
            {"environment": 8.0},
            {
                "environment": {"busy_s": 80.0, "waits_s": {"rollout": 60.0, "reward": 10.0}},
                "trainer": {"waits_s": {"experience": 8.0}},
            },
            "rollout",
            0.8 * 60 / 80,
        ),
        # Episodes wait for nobody: the environment itself is slow.
        (
            {"environment": 8.0},
            {
                "environment": {"busy_s": 80.0, "waits_s": {"rollout": 8.0}},
                "trainer": {"waits_s": {"experience": 8.0}},
            },
            "environment",
            0.8 * 72 / 80,
        ),
        # The trainer waits for nothing.
        ({"trainer": 10.0}, {"trainer": {}}, "trainer", 1.0),
        ({"controller": 9.0}, {"trainer": {}}, "controller", 0.9),
        # It asks experience for 6 s though a batch is ready; half of that is the store's.
        (
            {},
            {
                "trainer": {"waits_s": {"experience": 8.0}},
                "experience": {"handling_s": 8.0, "waits_s": {"store": 6.0}},
            },
            "store",
            0.8 * 0.75,
        ),
        ({"weights": 7.0}, {"trainer": {"waits_s": {"experience": 7.0}}}, "weights", 0.7),
        # A gateway that takes long itself, while nothing else is slow.
        (
            {"environment": 0.0},
            {
                "trainer": {"waits_s": {"experience": 10.0, "weights": 0.0}},
                "experience": {"handling_s": 9.9},
                "gateway": {"handling_s": 30.0, "waits_s": {"experience": 1.0}},
            },
            "gateway",
            2.9,
        ),
        # A process that does not run is to blame whatever waits for it.
        (
            {"environment": 4.0},
            {
                "environment": {"busy_s": 80.0, "stalled_s": 9.0, "waits_s": {"rollout": 80.0}},
                "trainer": {"waits_s": {"experience": 4.0, "weights": 4.0}},
            },
            "environment",
            0.9,
        ),
    ],
)
def test_the_root_of_waits_is_named(
    job_waits: dict[str, float],
    processes: dict[str, dict[str, Any]],
    bottleneck: str,
    score: float,
) -> None:
    found = attribute(*after(job_waits, **processes))
    assert found is not None
    assert found.bottleneck == bottleneck
    assert found.scores[bottleneck] == pytest.approx(score)
    assert found.tokens_per_s == {"j": pytest.approx(200.0)}


def test_what_is_in_one_snapshot_only_does_not_count() -> None:
    before, now = after({"environment": 8.0}, environment={"busy_s": 80.0})
    fresh = ProcessActivity("new", WorkerKind.ROLLOUT, stalled_s=99.0, busy_s=99.0)
    again = replace(now.processes[0], busy_s=1.0, stalled_s=1.0)
    started_again = replace(before.processes[0], busy_s=50.0, stalled_s=50.0)
    before = replace(before, processes=(started_again,))
    now = replace(now, processes=(again, fresh))
    found = attribute(before, now)
    assert found is not None
    assert [(each.kind, each.in_use, each.stalled) for each in found.services] == [
        ("environment", 0.0, 0.0),
        ("rollout", 0.0, 0.0),
    ]


def test_nothing_is_said_across_a_restart_of_experience() -> None:
    before, now = after({"trainer": 5.0})
    assert attribute(now, before) is None


def test_a_job_that_is_held_back_blames_nobody() -> None:
    before, now = after({})
    held = tuple(replace(job, held=True) for job in now.jobs)
    found = attribute(before, replace(now, jobs=held))
    assert found is not None
    assert found.bottleneck == ""
