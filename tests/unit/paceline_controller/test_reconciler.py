import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import parse_job
from paceline.config.quota import Quota
from paceline.config.service import ControllerOptions
from paceline.enums import JobState
from paceline.front.api.tenants import Tenant
from paceline_controller.jobs.plan import LiveJob, replicas_of
from paceline_controller.jobs.slots import QUARANTINE_S, STEADY_S
from paceline_controller.reconciler import Reconciler
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import FakeClock, FakeObserved, MemoryLedger, MemoryRuntime

OPTIONS = ControllerOptions(start_timeout_s=30, max_restart_backoff_s=4, give_up_after=3)
SPEC = parse_job(
    {
        "name": "a",
        "model": {"path": "models/tiny"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
    }
)


class World:
    def __init__(self, options: ControllerOptions = OPTIONS) -> None:
        self.options = options
        self.clock = FakeClock()
        self.runtime = MemoryRuntime(expand=replicas_of)
        self.ledger = MemoryLedger(reason_bytes=200)
        self.reconciler = self.controller()

    def controller(self) -> Reconciler:
        return Reconciler(
            ledger=self.ledger,
            runtime=self.runtime,
            options=self.options,
            child_grace_s=1.0,
            reason_bytes=self.ledger.reason_bytes,
            clock=self.clock,
        )

    def submit(self, state: JobState = JobState.QUEUED) -> None:
        self.ledger.jobs["a-1"] = LiveJob("a-1", state, 0, SPEC)

    async def passes(self, number: int = 1, *, every_s: float = 0.5) -> None:
        for _ in range(number):
            await self.reconciler.once()
            await self.reconciler.settle()
            self.clock.pass_s(every_s)

    @property
    def state(self) -> JobState:
        return self.ledger.jobs["a-1"].state

    def alive(self) -> set[str]:
        return {name for name, found in self.runtime.running.items() if found.alive}

    def starts_of(self, name: str) -> list[int]:
        return [incarnation for found, incarnation in self.runtime.starts if found == name]


@pytest.fixture
def world() -> World:
    return World()


POOLS = {"environment-0", "reward-0"}
OWN = {"trainer-a-1", "rollout-a-1-0"}


async def test_pools_start_before_any_job(world: World) -> None:
    await world.passes()
    assert world.alive() == POOLS


async def test_a_queued_job_gets_its_processes_and_moves_on(world: World) -> None:
    world.submit()
    await world.passes(2)
    assert world.alive() == POOLS | OWN
    assert world.state is JobState.STARTING
    assert world.starts_of("trainer-a-1") == [1]
    assert world.starts_of("rollout-a-1-0") == [0]


async def test_every_start_of_a_trainer_has_a_new_incarnation(world: World) -> None:
    world.submit()
    await world.passes()
    world.runtime.die("trainer-a-1")
    await world.passes(3)
    assert world.starts_of("trainer-a-1") == [1, 2]


class Late(MemoryRuntime):
    """A start of the trainer ends just after the next list was answered, which does not show it."""

    def __init__(self) -> None:
        super().__init__(expand=replicas_of)
        self.begun, self.gate = False, asyncio.Event()

    async def list(self) -> Any:
        found = await super().list()
        if self.begun and not self.gate.is_set():
            self.gate.set()
            for _ in range(5):  # the start ends meanwhile
                await asyncio.sleep(0)
        return found

    async def start(self, wanted: Any, *, incarnation: int) -> None:
        if wanted.name == "trainer-a-1":
            self.begun = True
            await self.gate.wait()
        await super().start(wanted, incarnation=incarnation)


async def test_a_process_started_after_the_list_is_not_dead() -> None:
    """A list that was answered before the trainer was made said that it is gone."""
    world = World(OPTIONS.model_copy(update={"give_up_after": 1}))
    world.runtime = Late()
    world.reconciler = world.controller()
    world.submit()
    await world.reconciler.once()  # starts are under way
    await asyncio.sleep(0)
    await world.reconciler.once()
    assert "trainer-a-1" in world.alive()
    assert world.state is JobState.STARTING
    await world.passes(5)
    assert (world.state, world.starts_of("trainer-a-1")) == (JobState.STARTING, [1])


async def test_pauses_between_restarts_grow(world: World) -> None:
    await world.passes()
    started: list[float] = []
    for _ in range(4):
        world.runtime.die("reward-0")
        before = len(world.starts_of("reward-0"))
        began = world.clock()
        while len(world.starts_of("reward-0")) == before:
            await world.passes(every_s=0.25)
        started.append(world.clock() - began)
    assert started == sorted(started)
    assert started[-1] >= 2 * started[0]


class Machines(MemoryRuntime):
    """Says last words of two processes only when it is asked for both at a time."""

    both = asyncio.Barrier(2)

    async def last_words(self, name: str) -> str:
        async with asyncio.timeout(PATIENCE_S):
            await self.both.wait()
        return f"the end of {name}"


async def test_last_words_of_all_that_has_died_are_asked_for_together(world: World) -> None:
    world.runtime = Machines(expand=replicas_of)
    world.reconciler = world.controller()
    await world.passes()
    for name in POOLS:
        world.runtime.die(name)
    await world.passes()
    await world.passes(4)
    assert all(len(world.starts_of(name)) == 2 for name in POOLS)


async def test_a_stable_life_resets_the_pause(world: World) -> None:
    await world.passes()
    for _ in range(2):
        world.runtime.die("reward-0")
        await world.passes(4)
    await world.passes(30)
    world.runtime.die("reward-0")
    before = len(world.starts_of("reward-0"))
    await world.passes(2)
    assert len(world.starts_of("reward-0")) == before + 1


async def test_a_job_fails_when_its_process_never_gets_on(world: World) -> None:
    world.submit()
    for _ in range(60):
        await world.passes()
        if "rollout-a-1-0" in world.alive():
            world.runtime.die("rollout-a-1-0")
    assert world.state is JobState.FAILED
    assert "rollout-a-1-0 failed 3 times without progress" in world.ledger.reasons["a-1"]
    assert "ValueError: the end of rollout-a-1-0" in world.ledger.reasons["a-1"]
    assert world.alive() == POOLS


REFUSED = "RefusedWeightsError: version 7, which another worker serves, was refused in 3 loads"
MISSING = "ModuleNotFoundError: No module named 'sglang'"


async def until_it_ends(world: World, *, dies: str, every_s: float = 0.5) -> None:
    """A process dies in each of its lives, as soon as it is seen to be alive."""
    for _ in range(400):
        if world.state is JobState.FAILED:
            return
        if dies in world.alive():
            world.runtime.die(dies)
        await world.passes(every_s=every_s)
    raise AssertionError("the job goes on")


@pytest.mark.parametrize(
    ("words", "starts"),
    [(MISSING, 3), ("OOM: no more", 3), (REFUSED, 3), ("ValueError: by chance", 10)],
)
async def test_a_reason_that_lasts_is_not_tried_often(words: str, starts: int) -> None:
    world = World(OPTIONS.model_copy(update={"give_up_after": 10}))
    world.submit()
    world.runtime.silent.add("rollout-a-1-0")
    world.runtime.words = words
    await until_it_ends(world, dies="rollout-a-1-0")
    assert len(world.starts_of("rollout-a-1-0")) == starts
    assert world.ledger.reasons["a-1"] == (
        f"rollout-a-1-0 failed {starts} times without progress: {words}"
    )


async def test_one_machine_of_several_does_not_fail_a_job_so_soon() -> None:
    """Its other worker is ready, so the job lacks nothing."""
    world = World(OPTIONS.model_copy(update={"give_up_after": 10}))
    rollout = SPEC.rollout.model_copy(update={"replicas": 2})
    world.ledger.jobs["a-1"] = LiveJob(
        "a-1", JobState.QUEUED, 0, SPEC.model_copy(update={"rollout": rollout})
    )
    world.runtime.silent.add("rollout-a-1-1")
    world.runtime.words = MISSING
    await until_it_ends(world, dies="rollout-a-1-1")
    assert len(world.starts_of("rollout-a-1-1")) == 10


async def test_a_worker_that_refuses_what_another_one_serves_is_quarantined() -> None:
    """The job makes steps meanwhile, so it would be started again for ever."""
    world = World(OPTIONS.model_copy(update={"give_up_after": 10}))
    rollout = SPEC.rollout.model_copy(update={"replicas": 2})
    spec = SPEC.model_copy(update={"rollout": rollout})
    world.submit(JobState.RUNNING)
    name = "rollout-a-1-1"
    world.runtime.words = REFUSED
    for step in range(40):
        world.ledger.jobs["a-1"] = replace(world.ledger.jobs["a-1"], spec=spec, step=step)
        await world.passes(2)
        if name in world.alive():
            world.runtime.die(name)
        await world.passes(20)
    assert len(world.starts_of(name)) == 3
    told = f"{name} is quarantined for 10 min: {REFUSED}"
    assert (world.state, world.ledger.jobs["a-1"].reason) == (JobState.RUNNING, told)
    await world.passes(2, every_s=QUARANTINE_S)
    assert len(world.starts_of(name)) == 4
    await world.passes(2)
    world.runtime.die(name)
    await world.passes(20)
    assert len(world.starts_of(name)) == 4
    await world.passes(2, every_s=QUARANTINE_S)
    world.runtime.words = "killed"
    await world.passes(2, every_s=STEADY_S)
    assert world.ledger.jobs["a-1"].reason == ""


async def test_a_job_says_how_its_worker_fails_to_start(world: World) -> None:
    world.submit(JobState.RUNNING)
    world.runtime.words = MISSING
    world.runtime.silent.add("rollout-a-1-0")
    await world.passes(2)
    world.runtime.die("rollout-a-1-0")
    await world.passes()
    once = f"rollout-a-1-0 failed once without progress: {MISSING}"
    assert (world.state, world.ledger.jobs["a-1"].reason) == (JobState.RUNNING, once)
    await world.passes(4)  # it is started again
    assert world.ledger.jobs["a-1"].reason == once
    world.runtime.silent.clear()
    await world.passes(2)
    assert world.ledger.jobs["a-1"].reason == ""


async def test_one_death_of_a_worker_that_was_ready_is_not_worth_a_word(world: World) -> None:
    world.submit(JobState.RUNNING)
    await world.passes(2)
    world.runtime.die("rollout-a-1-0")
    await world.passes(3)
    assert world.ledger.jobs["a-1"].reason == ""


async def test_one_death_of_a_worker_that_is_wrong_is_told_until_it_is_ready_again(
    world: World,
) -> None:
    world.submit(JobState.RUNNING)
    world.runtime.words = REFUSED
    await world.passes(2)
    world.runtime.die("rollout-a-1-0")
    await world.passes()
    told = f"rollout-a-1-0 failed once without progress: {REFUSED}"
    assert world.ledger.jobs["a-1"].reason == told
    await world.passes(6)
    assert world.ledger.jobs["a-1"].reason == ""


async def test_to_be_ready_is_no_progress_of_a_job(world: World) -> None:
    """A worker that always dies before it has done anything, though it is ready for a while."""
    world.submit(JobState.RUNNING)
    for _ in range(10):
        await world.passes(40)  # 20 s
        if world.state is JobState.FAILED:
            break
        world.runtime.die("rollout-a-1-0")
    assert world.state is JobState.FAILED
    assert len(world.starts_of("rollout-a-1-0")) == OPTIONS.give_up_after


async def test_a_job_hears_what_keeps_its_workloads_from_running(world: World) -> None:
    world.submit()
    world.runtime.waits["a-1"] = "trainer-a-1: FailedCreate: exceeded quota: few"
    await world.passes(2)
    assert (world.state, world.ledger.reasons["a-1"]) == (
        JobState.STARTING,
        "trainer-a-1: FailedCreate: exceeded quota: few",
    )
    world.runtime.waits.clear()
    await world.passes()
    assert (world.state, world.ledger.reasons["a-1"]) == (JobState.STARTING, "")


SAID = "trainer: resumes from step 3: step-000004: digest differs"


async def test_the_reason_of_a_trainer_is_kept(world: World) -> None:
    world.submit(JobState.RUNNING)
    await world.passes(2)
    world.ledger.put("a-1", reason=SAID)  # as when it passes over damaged checkpoints
    await world.passes(2)
    assert world.ledger.jobs["a-1"].reason == SAID
    world.reconciler = world.controller()
    await world.passes(2)
    assert world.ledger.jobs["a-1"].reason == SAID


async def test_the_reason_of_a_trainer_is_restored_when_nothing_is_pending(world: World) -> None:
    world.submit(JobState.RUNNING)
    world.ledger.put("a-1", reason=SAID)
    world.runtime.waits["a-1"] = "rollout-a-1: no machine"
    await world.passes(2)
    assert world.ledger.jobs["a-1"].reason == "rollout-a-1: no machine"
    world.runtime.waits.clear()
    await world.passes()
    assert world.ledger.jobs["a-1"].reason == SAID


async def test_a_truncated_reason_is_reported_once(world: World) -> None:
    world.submit()
    world.runtime.waits["a-1"] = "trainer-a-1: FailedCreate: " + "é" * 300
    await world.passes(2)
    told = world.ledger.told
    await world.passes(3)
    assert world.ledger.told == told
    assert world.ledger.jobs["a-1"].reason.endswith(" ... (627 bytes in all)")


async def test_a_new_controller_clears_the_reasons_of_its_predecessor(world: World) -> None:
    world.submit(JobState.RUNNING)
    world.runtime.waits["a-1"] = "rollout-a-1: no machine"
    await world.passes(2)
    world.reconciler = world.controller()
    world.runtime.waits.clear()
    await world.passes()
    assert world.ledger.jobs["a-1"].reason == ""


async def test_a_new_controller_continues_counting_trainer_failures(world: World) -> None:
    world.submit(JobState.RUNNING)
    world.ledger.causes["a-1"] = "OOM: MemoryError: no more (rank 1)"
    for _ in range(40):
        await world.passes(2)
        if "trainer-a-1" in world.alive():
            world.runtime.die("trainer-a-1")
            await world.passes()
            world.reconciler = world.controller()
    assert world.state is JobState.FAILED
    assert len(world.starts_of("trainer-a-1")) == OPTIONS.give_up_after
    told = "trainer-a-1 failed 3 times without progress: OOM: MemoryError: no more (rank 1)"
    assert world.ledger.reasons["a-1"] == told


async def test_a_kill_takes_precedence_over_errors_of_other_ranks(world: World) -> None:
    world.submit(JobState.RUNNING)
    world.ledger.causes["a-1"] = "RuntimeError: connection closed by peer (rank 0)"
    world.runtime.words = "ended by SIGKILL\nTraceback"
    for _ in range(40):
        await world.passes(2)
        if "trainer-a-1" in world.alive():
            world.runtime.die("trainer-a-1")
    assert "progress: ended by SIGKILL; RuntimeError: conn" in world.ledger.reasons["a-1"]


async def test_a_job_with_a_missed_end_fails_at_the_next_exit(world: World) -> None:
    world.submit(JobState.RUNNING)
    lives = 0
    while world.state is JobState.RUNNING and lives < 10:
        await world.passes()
        if "rollout-a-1-0" in world.alive():
            lives += 1
            world.runtime.die("rollout-a-1-0")
            world.ledger.away = lives == OPTIONS.give_up_after
    assert (world.state, lives) == (JobState.FAILED, OPTIONS.give_up_after + 1)


async def test_a_trainer_that_gets_on_is_restarted_for_ever(world: World) -> None:
    world.submit(JobState.RUNNING)
    for step in range(1, 60):
        world.ledger.put("a-1", step=step)
        await world.passes(2)
        if "trainer-a-1" in world.alive():
            world.runtime.die("trainer-a-1")
    assert world.state is JobState.RUNNING
    assert len(world.starts_of("trainer-a-1")) > 2 * OPTIONS.give_up_after


async def test_a_broken_pool_fails_the_jobs_that_use_it_and_no_queued_one(world: World) -> None:
    world.submit(JobState.RUNNING)
    world.ledger.jobs["a-2"] = LiveJob("a-2", JobState.QUEUED, 0, SPEC)
    world.ledger.quotas["default"] = Tenant("default", Quota(jobs=1))
    for _ in range(60):
        await world.passes()
        if world.state is JobState.FAILED:
            break
        if "environment-0" in world.alive():
            world.runtime.die("environment-0")
    assert world.state is JobState.FAILED
    assert world.ledger.jobs["a-2"].state is JobState.QUEUED
    # What the pool said last may be of another tenant's job.
    assert world.ledger.reasons["a-1"] == (
        "the shared pool environment-0 does not run: it failed 3 times; see its log"
    )


async def test_what_cannot_be_started_at_all_is_tried_with_pauses(world: World) -> None:
    world.runtime.broken.add("reward-0")
    await world.passes(20)
    assert 2 < len(world.starts_of("reward-0")) < 10


async def test_one_that_never_answers_is_replaced(world: World) -> None:
    world.runtime.silent.add("reward-0")
    await world.passes(80)
    assert "reward-0" in world.runtime.stops
    assert len(world.starts_of("reward-0")) == 2


async def test_cancelling_ends_when_its_processes_are_gone(world: World) -> None:
    world.submit(JobState.RUNNING)
    await world.passes(2)
    world.ledger.put("a-1", state=JobState.CANCELLING)
    await world.reconciler.once()
    assert world.state is JobState.CANCELLING
    await world.passes(3)
    assert world.state is JobState.CANCELLED
    assert world.alive() == POOLS


@pytest.mark.parametrize("state", [s for s in JobState if s.terminal])
async def test_a_job_that_is_over_keeps_no_process(world: World, state: JobState) -> None:
    world.submit(JobState.RUNNING)
    await world.passes(2)
    world.ledger.put("a-1", state=state)
    await world.passes(2)
    assert world.alive() == POOLS


async def test_what_runs_is_adopted_and_not_started_again(world: World) -> None:
    world.submit(JobState.RUNNING)
    await world.passes(2)
    starts = list(world.runtime.starts)
    world.reconciler = world.controller()
    await world.passes(3)
    assert world.runtime.starts == starts
    world.runtime.die("trainer-a-1")
    await world.passes(3)
    assert world.starts_of("trainer-a-1") == [1, 2]


async def test_processes_of_jobs_it_cannot_ask_about_are_left_alone(world: World) -> None:
    world.runtime.running["trainer-b-1"] = FakeObserved("trainer-b-1", "b-1")
    world.ledger.away = True
    await world.passes(3)
    assert world.alive() == POOLS | {"trainer-b-1"}
    world.ledger.away = False
    await world.passes(2)
    assert world.alive() == POOLS


async def test_restarts_continue_while_experience_is_unreachable(world: World) -> None:
    world.submit(JobState.RUNNING)
    await world.passes(2)
    world.ledger.away = True
    for name in OWN:
        world.runtime.die(name)
    await world.passes(4)
    assert "rollout-a-1-0" in world.alive()
    assert "trainer-a-1" not in world.alive()
    world.ledger.away = False
    await world.passes(2)
    assert world.alive() == POOLS | OWN


async def test_outdated_processes_are_replaced(world: World) -> None:
    await world.passes()
    world.runtime.running["reward-0"].outdated = True
    await world.passes(3)
    assert world.runtime.stops == ["reward-0"]
    assert world.alive() == POOLS


async def test_a_job_that_names_an_unknown_pool_fails_with_the_allowed_ones(world: World) -> None:
    world.submit()
    rollout = SPEC.rollout.model_copy(update={"pools": ("spot",)})
    world.ledger.put("a-1", spec=SPEC.model_copy(update={"rollout": rollout}))
    await world.passes(2)
    assert world.state is JobState.FAILED
    expected = "rollout.pools: 'spot' is not a pool of this installation; allowed: default"
    assert world.ledger.reasons["a-1"] == expected
    assert world.alive() == POOLS


async def test_whole_workloads_are_resized_and_not_restarted(world: World) -> None:
    world.runtime.expand = list
    await world.passes()
    assert world.alive() == {"environment", "reward"}
    world.runtime.running["reward"].replicas = 5
    await world.passes()
    assert world.runtime.scales == [("reward", 1)]
    assert world.runtime.stops == []


async def test_pools_keep_their_size_until_the_jobs_are_known(world: World) -> None:
    """Who scaled them up was the controller before; its jobs may be at work in all of them."""
    world.runtime.expand = list
    await world.passes()
    world.runtime.running["environment"].replicas = 9
    world.ledger.away = True
    world.reconciler = world.controller()
    await world.passes(3)
    assert world.runtime.running["environment"].replicas == 9
    world.ledger.away = False
    await world.passes(2)
    assert world.runtime.running["environment"].replicas == OPTIONS.environment_replicas


async def test_processes_of_pools_stay_until_the_jobs_are_known(world: World) -> None:
    await world.passes()
    world.runtime.running["environment-1"] = FakeObserved("environment-1", "")
    world.ledger.away = True
    world.reconciler = world.controller()
    await world.passes(3)
    assert world.alive() == POOLS | {"environment-1"}
    world.ledger.away = False
    await world.passes(2)
    assert world.alive() == POOLS


async def test_a_workload_that_the_platform_is_at_work_on_never_hangs(world: World) -> None:
    world.runtime.expand = list
    world.runtime.silent.add("reward")
    await world.passes()
    world.runtime.running["reward"].pending = True
    await world.passes(200)
    assert world.runtime.stops == []
    world.runtime.running["reward"].pending = False
    await world.passes(80)
    assert world.runtime.stops == ["reward"]


async def test_stop_all(world: World) -> None:
    world.submit()
    await world.passes(2)
    await world.reconciler.stop_all()
    assert world.alive() == set()


def faults(world: World) -> list[Callable[[], Any]]:
    return [
        lambda: world.runtime.running.clear(),
        lambda: setattr(world.ledger, "away", True),
        lambda: setattr(world.ledger, "away", False),
        lambda: [world.runtime.die(name) for name in world.runtime.running],
        lambda: world.clock.pass_s(100),
    ]


async def test_it_comes_back_from_any_sequence_of_faults() -> None:
    world = World(OPTIONS.model_copy(update={"give_up_after": 1000}))
    world.submit(JobState.RUNNING)
    for first in range(5):
        for second in range(5):
            await world.passes()
            faults(world)[first]()
            await world.passes(2)
            faults(world)[second]()
    world.ledger.away = False
    await world.passes(20)
    assert world.alive() == POOLS | OWN


async def test_a_job_that_is_paused_keeps_its_trainer_until_it_ends(world: World) -> None:
    world.submit(JobState.RUNNING)
    await world.passes(2)
    assert world.alive() >= OWN
    world.ledger.put("a-1", state=JobState.PAUSING, reason="lunch")
    await world.passes(20)
    assert world.alive() == POOLS | {"trainer-a-1"}
    assert world.state is JobState.PAUSING
    world.runtime.die("trainer-a-1")
    await world.passes(3)
    assert world.alive() == POOLS
    job = world.ledger.jobs["a-1"]
    assert (job.state, job.reason) == (JobState.PAUSED, "lunch")
    assert world.starts_of("trainer-a-1") == [1]
    assert world.ledger.failures == {}
    world.ledger.put("a-1", state=JobState.QUEUED, reason="")
    await world.passes(2)
    assert world.alive() == POOLS | OWN
    assert world.starts_of("trainer-a-1") == [1, 2]


async def test_a_trainer_that_hangs_does_not_keep_a_job_from_being_paused(world: World) -> None:
    world.submit(JobState.RUNNING)
    await world.passes(2)
    world.ledger.put("a-1", state=JobState.PAUSING)
    world.runtime.silent.add("trainer-a-1")
    await world.passes(80)
    assert (world.alive(), world.state) == (POOLS, JobState.PAUSED)
