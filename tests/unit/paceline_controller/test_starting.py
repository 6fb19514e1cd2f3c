"""Queued jobs in a controller: quotas, reasons, room in pools, restarts."""

from typing import Any

from paceline.config import parse_job
from paceline.config.quota import Quota
from paceline.config.service import ControllerOptions, PoolOptions
from paceline.enums import JobState
from paceline.front.api.tenants import Tenant
from paceline_controller.jobs.plan import LiveJob, replicas_of
from paceline_controller.reconciler import Reconciler
from paceline_harness.runtime import FakeClock, MemoryLedger, MemoryRuntime

OPTIONS = ControllerOptions(pools={"default": PoolOptions(max_replicas=4)})


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.runtime = MemoryRuntime(expand=replicas_of)
        self.ledger = MemoryLedger()
        self.reconciler = self.controller()

    def controller(self) -> Reconciler:
        return Reconciler(
            ledger=self.ledger,
            runtime=self.runtime,
            options=OPTIONS,
            child_grace_s=1.0,
            reason_bytes=self.ledger.reason_bytes,
            clock=self.clock,
        )

    def submit(self, job_id: str, tenant: str = "a", *, age_s: float = 0.0, **rollout: Any) -> None:
        raw = {
            "name": "j",
            "tenant": tenant,
            "model": {"path": "m"},
            "tasks": {"environment": "arithmetic"},
            "reward": ["exact"],
            "rollout": rollout,
        }
        job = LiveJob(job_id, JobState.QUEUED, 0, parse_job(raw), age_s=age_s)
        self.ledger.jobs[job_id] = job

    def quota(self, tenant: str = "a", **limits: Any) -> None:
        self.ledger.quotas[tenant] = Tenant(tenant, Quota(**limits))

    async def passes(self, number: int = 2) -> None:
        for _ in range(number):
            await self.reconciler.once()
            await self.reconciler.settle()
            self.clock.pass_s(0.5)

    def states(self) -> dict[str, str]:
        return {job_id: str(job.state) for job_id, job in self.ledger.jobs.items()}

    def rollouts(self) -> set[str]:
        return {name for name in self.runtime.running if name.startswith("rollout-")}


async def test_more_jobs_than_the_quota_stay_queued_without_processes() -> None:
    world = World()
    world.quota(jobs=1)
    for number in range(3):
        world.submit(f"j{number}", age_s=10.0 - number)
    await world.passes()
    assert world.states() == {"j0": "starting", "j1": "queued", "j2": "queued"}
    assert world.ledger.jobs["j2"].reason == (
        "waits in position 2 of 2 of tenant 'a': quota jobs: 1 of 1 run"
    )
    assert world.rollouts() == {"rollout-j0-0"}
    world.ledger.put("j0", state=JobState.SUCCEEDED)
    await world.passes()
    assert world.states() == {"j0": "succeeded", "j1": "starting", "j2": "queued"}
    assert world.ledger.jobs["j1"].reason == ""
    assert "position 1 of 1" in world.ledger.jobs["j2"].reason


async def test_a_waiting_reason_is_reported_once_even_if_truncated() -> None:
    world = World()
    world.ledger.reason_bytes = 64
    world.reconciler = world.controller()
    world.quota("many-words", jobs=0)
    world.submit("j0", "many-words")
    await world.passes()
    told = world.ledger.told
    await world.passes(3)
    assert (world.ledger.told, world.states()) == (told, {"j0": "queued"})
    assert world.ledger.jobs["j0"].reason.endswith("bytes in all)")


async def test_a_new_controller_finds_the_queue_as_it_was() -> None:
    world = World()
    world.quota(jobs=2)
    for number in range(4):
        world.submit(f"j{number}", age_s=10.0 - number)
    await world.passes()
    before = world.states()
    world.reconciler = world.controller()
    await world.passes(4)
    assert world.states() == before
    assert list(before.values()).count("queued") == 2


async def test_a_job_of_fixed_size_waits_for_room_in_its_pool() -> None:
    world = World()
    world.submit("first", replicas=3, age_s=9.0)
    world.submit("second", "b", replicas=2)
    await world.passes()
    assert len(world.rollouts()) == 3
    assert "it needs 2 rollout workers, and 1 of 4 are free in pool default" in (
        world.ledger.jobs["second"].reason
    )
    world.ledger.put("first", state=JobState.CANCELLING)
    await world.passes(4)
    assert world.states() == {"first": "cancelled", "second": "starting"}
    assert world.rollouts() == {"rollout-second-0", "rollout-second-1"}


async def test_workers_that_have_not_gone_yet_keep_their_room() -> None:
    world = World()
    world.submit("first", replicas=3, age_s=9.0)
    await world.passes()
    world.submit("second", replicas=2)
    world.ledger.put("first", state=JobState.CANCELLING)
    await world.reconciler.once()  # the stops are still under way
    assert world.states()["second"] == "queued"


async def test_while_quotas_are_not_known_nothing_starts() -> None:
    world = World()
    await world.passes()
    world.submit("j0")
    world.ledger.away = True
    await world.passes()
    assert world.states() == {"j0": "queued"}
    world.ledger.away = False
    await world.passes()
    assert world.states() == {"j0": "starting"}
