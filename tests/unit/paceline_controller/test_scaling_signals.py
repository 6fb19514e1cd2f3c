"""Signals from the roster and the ledger, and sizes for the reconciler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from paceline.config.sections.scaling import EnvironmentScaling, ScalingOptions
from paceline.config.service import ControllerOptions, PoolOptions
from paceline.enums import JobState, WorkerKind
from paceline.errors import UnavailableError
from paceline.platform.telemetry.metrics import Metrics
from paceline.types import Worker
from paceline_controller.demand_source import JobDemand
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.plan import LiveJob, replicas_of
from paceline_controller.jobs.starting import running_replicas
from paceline_controller.reconciler import Reconciler
from paceline_controller.scaling.collector import Collector
from paceline_controller.scaling.scaler import Scaler
from paceline_controller.scaling.signals import Signals
from paceline_harness.runtime import FakeClock, MemoryLedger, MemoryRuntime
from paceline_harness.scaling.rehearsal import spec_of
from paceline_harness.scaling.simulated import WorkloadModel

OPTIONS = ControllerOptions(
    pools={"default": PoolOptions(), "spot": PoolOptions(cost=2.0, spot=True)},
    scaling=ScalingOptions(warmup_s=10, period_s=5, environment=EnvironmentScaling()),
)
JOB = LiveJob("a-1", JobState.RUNNING, 0, spec_of(WorkloadModel(), replicas=2))


def worker(kind: WorkerKind, name: str, **fields: Any) -> Worker:
    job_id = "" if kind in {WorkerKind.ENVIRONMENT, WorkerKind.REWARD} else "a-1"
    return replace(Worker(worker_id=name, kind=kind, endpoint="", job_id=job_id), **fields)


def rollout(name: str, *, version: int = 3, pool: str = "", pid: int = 1, **load: float) -> Worker:
    kind = WorkerKind.ROLLOUT
    return worker(kind, name, active_version=version, pool=pool, pid=pid, load=dict(load))


class Looks:
    """A collector and a clock."""

    def __init__(self) -> None:
        self.collector = Collector(OPTIONS)
        self.now_s = 100.0

    def __call__(self, *workers: Worker, after_s: float = 20.0, **demand: Any) -> Signals:
        self.now_s += after_s
        told = {"a-1": JobDemand(job_id="a-1", **demand)}
        return self.collector.collect(jobs=[JOB], workers=workers, demand=told, now_s=self.now_s)


@pytest.fixture
def look() -> Looks:
    return Looks()


def test_counters_become_deltas_since_the_last_sample(look: Looks) -> None:
    def trainer(step_s: float, wait_s: float, version: int) -> Worker:
        load = {"step_s": step_s, "publish_s": 1.0, "wait_s": wait_s}
        return worker(WorkerKind.TRAINER, "t", active_version=version, load=load)

    first = look(trainer(100.0, 50.0, 3), step=7, accepted_groups=70, sampled_tokens=1000)
    (job,) = first.jobs
    assert (first.seconds, job.steps, job.step_s, job.groups, job.tokens) == (0, 0, 0, 0, 0)
    second = look(trainer(112.0, 55.0, 5), step=9, accepted_groups=95, sampled_tokens=1800)
    (job,) = second.jobs
    assert second.seconds == 20
    assert (job.step, job.steps, job.step_s, job.wait_s, job.published) == (9, 2, 12.0, 5.0, 2)
    assert (job.groups, job.tokens) == (25, 800)


def test_a_trainer_that_begins_again_counts_from_zero(look: Looks) -> None:
    def trainer(step_s: float) -> Worker:
        return worker(WorkerKind.TRAINER, "t", load={"step_s": step_s})

    look(trainer(100.0), step=7, accepted_groups=70)
    (job,) = look(trainer(4.0), step=5, accepted_groups=69).jobs
    assert (job.step_s, job.steps, job.groups) == (4.0, 0, 0)


def test_versions_are_not_counted_again_after_a_trainer_was_away(look: Looks) -> None:
    def trainer(name: str, version: int) -> Worker:
        return worker(WorkerKind.TRAINER, name, active_version=version)

    look(trainer("t-1", 50))
    look()
    look(trainer("t-2", -1))
    (job,) = look(trainer("t-2", 51)).jobs
    assert job.published <= 1
    (job,) = look(trainer("t-2", 53)).jobs
    assert job.published == 2


def test_only_warm_workers_count_for_the_measured_speed(look: Looks) -> None:
    look(rollout("r-0", running=10, tokens_generated=100, busy_s=5, request_s=50))
    new = rollout("r-1", running=40, tokens_generated=7, busy_s=1, request_s=9)
    old = rollout("r-0", running=20, tokens_generated=1100, busy_s=25, request_s=300)
    seen = look(old, new).jobs[0].pools["default"]
    assert (seen.ready, seen.warm, seen.open_requests) == (2, 1, 60)
    # What it counted while it warmed up is left out.
    assert (seen.requests, seen.tokens, seen.busy_s) == (0, 0, 0)
    later = look(
        rollout("r-0", running=20, tokens_generated=2100, busy_s=45, request_s=800),
        rollout("r-1", running=20, tokens_generated=900, busy_s=19, request_s=400),
    )
    seen = later.jobs[0].pools["default"]
    assert (seen.warm, seen.requests, seen.tokens, seen.busy_s) == (2, 25, 1000, 20)


def test_requests_at_once_are_those_of_the_time_in_which_it_works(look: Looks) -> None:
    """However rarely that is, and whatever it does at the moment of its report."""

    def seen(busy_s: float, request_s: float) -> float:
        one = rollout("r-0", running=0, max_running=4, busy_s=busy_s, request_s=request_s)
        return look(one).jobs[0].pools["default"].requests

    assert [seen(0.0, 0.0), seen(0.0, 0.0)] == [0, 0]
    assert seen(1.0, 3.0) == 3
    assert seen(1.5, 3.2) == 1, "a worker that works has one at least"
    assert seen(2.0, 103.2) == 4, "most of them wait for a place"


def test_a_worker_that_was_replaced_warms_up_again(look: Looks) -> None:
    look(rollout("r-0", running=1))
    assert look(rollout("r-0", running=1)).jobs[0].pools["default"].warm == 1
    assert look(rollout("r-0", pid=2, running=1)).jobs[0].pools["default"].warm == 0


def test_workers_count_in_their_pools_once_they_have_weights(look: Looks) -> None:
    pools = look(rollout("r-0"), rollout("r-1", pool="spot"), rollout("r-2", version=-1))
    found = pools.jobs[0].pools
    assert {name: pool.ready for name, pool in found.items()} == {"default": 1, "spot": 1}


def test_weights_spread_until_most_have_them(look: Looks) -> None:
    trainer = worker(WorkerKind.TRAINER, "t", active_version=4)
    slow = [rollout("r-0", version=3), rollout("r-1", version=3), rollout("r-2", version=4)]
    look(trainer)
    assert look(trainer, *slow).jobs[0].spreading_s == 20
    assert look(trainer, slow[0], *[rollout(f"r-{i}", version=4) for i in (1, 2)]).jobs[
        0
    ].spreading_s == pytest.approx(0)


def test_shared_pools(look: Looks) -> None:
    def environment(cpu_s: float) -> Worker:
        load = {"cpu_s": cpu_s, "slots": 64.0, "waiting_score": 9.0}
        return worker(WorkerKind.ENVIRONMENT, "e-0", load=load)

    def reward(busy_s: float, scored: float) -> Worker:
        load = {"pending": 4.0, "busy_s": busy_s, "scored": scored}
        return worker(WorkerKind.REWARD, "w-0", load=load)

    look(environment(10.0), reward(1.0, 10.0))
    found = look(environment(25.0), reward(5.0, 50.0), queued=3, leased=4, headroom_groups=2)
    assert (found.environment.slots, found.environment.cpu_share) == (64.0, 0.75)
    assert (found.reward.pending, found.reward.busy_s, found.reward.scored) == (9.0, 4.0, 40.0)
    assert found.jobs[0].wanted_episodes == 7 + 2 * 8


@dataclass
class MemorySource:
    """What a test says."""

    there: list[Worker] = field(default_factory=list[Worker])
    wants: dict[str, JobDemand] = field(default_factory=dict[str, JobDemand])
    away: bool = False
    looks: int = 0

    async def workers(self) -> Sequence[Worker]:
        self.looks += 1
        if self.away:
            raise UnavailableError("experience cannot be reached")
        return self.there

    async def demand(self) -> Mapping[str, JobDemand]:
        return self.wants


def crowded() -> dict[str, JobDemand]:
    """More episodes than two workers of 256 requests can run."""
    return {"a-1": JobDemand(job_id="a-1", leased=1000)}


class Control:
    """A reconciler with a scaler, over memory; `expand` as for processes."""

    def __init__(self, options: ControllerOptions = OPTIONS) -> None:
        self.clock, self.runtime = FakeClock(), MemoryRuntime(expand=replicas_of)
        self.ledger, self.source = MemoryLedger(), MemorySource()
        self.options, self.metrics = options, Metrics()
        self.ledger.jobs["a-1"] = JOB
        self.start()

    def start(self) -> None:
        self.scaler = Scaler(source=self.source, options=self.options, metrics=self.metrics)
        self.reconciler = Reconciler(
            ledger=self.ledger,
            runtime=self.runtime,
            options=self.options,
            child_grace_s=1.0,
            sizing=self.scaler,
            clock=self.clock,
        )

    async def passes(self, number: int, *, every_s: float = 5.0) -> None:
        for _ in range(number):
            await self.reconciler.once()
            await self.reconciler.settle()
            self.clock.pass_s(every_s)

    def rollouts(self) -> list[str]:
        return sorted(name for name in self.runtime.running if name.startswith("rollout"))

    def shown(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


async def test_processes_are_added_and_the_newest_go_first() -> None:
    control = Control()
    await control.passes(2)
    assert control.rollouts() == ["rollout-a-1-0", "rollout-a-1-1"]
    control.source.wants = crowded()
    await control.passes(8)
    assert control.rollouts() == [f"rollout-a-1-{index}" for index in range(4)]
    bounds = {"min_replicas": 1, "max_replicas": 3}
    control.ledger.put("a-1", spec=spec_of(WorkloadModel(), scaling=bounds))
    await control.passes(2)
    assert control.rollouts() == [f"rollout-a-1-{index}" for index in range(3)]
    assert "rollout-a-1-3" in control.runtime.stops


async def test_a_controller_that_starts_again_takes_over_the_sizes() -> None:
    control = Control()
    control.source.wants = crowded()
    await control.passes(8)
    control.source.away = True
    control.start()
    await control.passes(3)
    assert len(control.rollouts()) == 4
    assert control.runtime.stops == []


async def test_without_signals_sizes_stay() -> None:
    control = Control()
    control.source.wants = crowded()
    await control.passes(8)
    control.source.away = True
    await control.passes(20)
    assert len(control.rollouts()) == 4


async def test_a_job_that_is_over_or_paused_has_no_rollout_workers() -> None:
    for state in (JobState.PAUSED, JobState.FAILED):
        control = Control()
        await control.passes(2)
        control.ledger.jobs["a-1"] = replace(JOB, state=state)
        await control.passes(2)
        assert control.rollouts() == []


async def test_it_looks_once_in_a_period() -> None:
    control = Control()
    await control.passes(20, every_s=1.0)
    assert control.source.looks == 4


async def test_no_worker_is_polled_when_nothing_is_scaled() -> None:
    control = Control(ControllerOptions())
    control.ledger.jobs["a-1"] = replace(
        JOB, spec=spec_of(WorkloadModel(), scaling=None, replicas=3)
    )
    await control.passes(20)
    assert control.source.looks == 0
    assert len(control.rollouts()) == 3


async def test_metrics_export_wanted_replicas_until_the_job_ends() -> None:
    control = Control()
    control.source.wants = crowded()
    control.source.there = [rollout("r-0", running=3.0)]
    await control.passes(8)
    labels = {"workload": "rollout", "job": "a-1", "pool": "default"}
    assert control.shown("paceline_wanted_replicas", **labels) == 4
    assert control.shown("paceline_ready_replicas", **labels) == 1
    assert control.shown("paceline_wanted_episodes", job="a-1") == 1000
    control.ledger.put("a-1", state=JobState.FAILED)
    await control.passes(2)
    assert control.shown("paceline_wanted_replicas", **labels) is None
    shared = {"workload": "environment", "job": "", "pool": ""}
    assert control.shown("paceline_wanted_replicas", **shared) == 1


async def test_a_former_leader_exports_no_decisions() -> None:
    control = Control()
    control.source.wants = crowded()
    await control.passes(4)
    labels = {"workload": "rollout", "job": "a-1", "pool": "default"}
    assert control.shown("paceline_wanted_replicas", **labels)
    control.scaler.close()
    assert control.shown("paceline_wanted_replicas", **labels) is None
    assert control.shown("paceline_pending_scores", workload="reward") is None


async def test_an_external_autoscaler_is_left_alone() -> None:
    scaling = OPTIONS.scaling.model_copy(update={"executor": "external"})
    control = Control(OPTIONS.model_copy(update={"scaling": scaling}))
    control.runtime.expand = list
    control.source.wants = crowded()
    await control.passes(3)
    control.runtime.running["rollout-a-1"].replicas = 7
    control.runtime.running["environment"].replicas = 0
    await control.passes(8)
    assert control.runtime.scales == []
    assert control.runtime.running["rollout-a-1"].replicas == 7
    labels = {"workload": "rollout", "job": "a-1", "pool": "default"}
    assert control.shown("paceline_wanted_replicas", **labels) == 4
    control.source.wants = {"a-1": JobDemand(job_id="a-1", leased=5000)}
    await control.passes(8)
    assert control.shown("paceline_wanted_replicas", **labels) == 20
    assert control.runtime.scales == []


def test_replicas_are_counted_with_and_without_names_of_their_own() -> None:
    found = [Observed("rollout-a-1-0", "a-1", True), Observed("rollout-a-1-1", "a-1", False)]
    assert running_replicas(found)["rollout-a-1"] == 2
    whole = Observed("rollout-a-1", "a-1", True, replicas=5)
    assert running_replicas([whole])["rollout-a-1"] == 5
