"""The number of series of 100 jobs and 1,000 workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from paceline.enums import DropReason, EpisodeState
from paceline.platform.progress import LedgerProgress
from paceline.platform.telemetry.metric_names import NAMES, OTHER
from paceline.platform.telemetry.metrics import GaugeSet, Metrics
from paceline.v1 import types_pb2
from paceline_controller.scaling.decide import Decision, ScalingMemory
from paceline_controller.scaling.gauges import values_of
from paceline_controller.scaling.rollout import JobMemory, Target
from paceline_controller.scaling.signals import JobSignals, PoolSignals, Signals
from paceline_experience.ledger.meter import BATCH, STATISTICS, STEP, JobMeter
from paceline_harness.monitoring.series import MOST_SERIES, SAYS, num_series, said, worst
from paceline_harness.scaling.rehearsal import spec_of
from paceline_harness.scaling.simulated import WorkloadModel

JOBS = [f"job-{number}" for number in range(100)]
WORKERS = {"rollout": 700, "trainer": 100, "environment": 150, "reward": 50}


@pytest.mark.parametrize("kind", SAYS)
def test_a_worker_has_a_bounded_number_of_series(kind: str) -> None:
    """A worker with every possible series."""
    assert num_series(worst(kind, "job-0")) <= MOST_SERIES
    wanted = {name for name, spec in NAMES.items() if kind in spec.services}
    assert wanted <= set(SAYS[kind]), "the table lacks a metric"


@pytest.mark.parametrize("kind", SAYS)
def test_label_values_in_the_table_are_allowed(kind: str) -> None:
    for name, labels in said(kind, "job-0"):
        assert labels.keys() == set(NAMES[name].labels), name
    metrics = worst(kind, "job-0")
    others = [
        sample.name
        for family in metrics.registry.collect()
        for sample in family.samples
        if OTHER in sample.labels.values() and "phase" not in sample.labels
    ]
    # Reward parts and callers are bounded, plus one series for `other`.
    assert set(others) <= {
        "paceline_score_seconds_total",
        "paceline_part_scores_total",
        "paceline_refused_calls_total",
    }


def everything() -> dict[str, Any]:
    """A metric row with every possible value."""
    slots = [f"slot{number}_zeroed" for number in range(20)]
    names = [*BATCH, *STEP, *STATISTICS, *slots]
    ages = {str(age): 1 for age in range(20)}
    return dict.fromkeys(names, 1.0) | {"staleness": ages, "batch_episodes": 8}


def of_a_ledger() -> LedgerProgress:
    """The progress of a ledger with episodes in every state, dropped for every reason."""
    counts = {str(state): 1 for state in EpisodeState} | {"admitted": len(EpisodeState)}
    dropped = {str(reason): 1 for reason in DropReason}
    return LedgerProgress(counts=counts, dropped=dropped, reward_mean=1.0, eval_reward=1.0)


def live_through(metrics: Metrics, job: str) -> None:
    """Export every metric of a job."""
    meter = JobMeter(metrics, job)
    meter.open()
    meter.bounded(spec_of(WorkloadModel()))
    for purpose in (types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVAL):
        parts = {f"part-{number}": 1.0 for number in range(20)}
        score = types_pb2.Score(reward=1.0, parts=parts)
        meter.submitted([types_pb2.Trajectory(purpose=purpose, score=score)])
    meter.expired(1)
    meter.decided([0.0, 1.0])
    meter.decided([1.0, 1.0])
    meter.row("train", everything())
    meter.show(of_a_ledger(), Counter(attempts=1))
    meter.checkpointed()
    meter.verified(0)


def test_a_thousand_workers_of_a_hundred_jobs() -> None:
    """All processes together, including those with series of every live job."""
    workers = sum(
        num_series(worst(kind, JOBS[number % len(JOBS)]))
        for kind, count in WORKERS.items()
        for number in range(count)
    )
    experience, controller = Metrics(), Metrics()
    for job in JOBS:
        live_through(experience, job)
    scaled(controller, JOBS)
    assert num_series(experience) <= 110 * len(JOBS)
    assert num_series(controller) <= 10 * len(JOBS)
    assert workers + num_series(experience) + num_series(controller) < 54_000


def scaled(metrics: Metrics, jobs: list[str]) -> GaugeSet:
    """Let the controller observe these jobs."""
    target = Target(1.0, starves=False, plenty=False, why="", rate=1.0)
    pools = {"default": PoolSignals(ready=1, tokens=1.0, busy_s=1.0)}
    signals = Signals(
        seconds=1.0,
        jobs=tuple(JobSignals(job, spec_of(WorkloadModel()), pools=pools) for job in jobs),
    )
    memory = ScalingMemory(jobs={job: JobMemory() for job in jobs})
    gauges = GaugeSet(metrics)
    gauges.show(values_of(signals, Decision({}, memory, {}, dict.fromkeys(jobs, target))))
    return gauges


def test_finished_jobs_leave_no_series_in_the_controller() -> None:
    metrics = Metrics()
    gauges = scaled(metrics, [])
    before = num_series(metrics)
    gauges = scaled(metrics, JOBS)
    assert num_series(metrics) > before
    gauges.show(values_of(Signals(seconds=1.0), Decision({}, ScalingMemory(), {}, {})))
    assert num_series(metrics) == before
