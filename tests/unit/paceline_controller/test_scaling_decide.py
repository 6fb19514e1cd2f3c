"""What always holds of the decision, whatever the signals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.sections.scaling import EnvironmentScaling, RewardScaling, ScalingOptions
from paceline.config.service import ControllerOptions, PoolOptions
from paceline_controller.jobs.plan import pools_of, rollout_name
from paceline_controller.scaling.decide import Decision, ScalingMemory, decide
from paceline_controller.scaling.rollout import JobMemory
from paceline_controller.scaling.signals import (
    EnvironmentSignals,
    JobSignals,
    PoolSignals,
    RewardSignals,
    Signals,
)
from paceline_harness.scaling.rehearsal import spec_of
from paceline_harness.scaling.simulated import WorkloadModel

EAGER = ScalingOptions(
    scale_up_cooldown_s=0,
    scale_down_stabilization_s=0,
    max_scale_up=1000.0,
    warmup_s=0,
    requests_each=0.01,
)
POOLS = {
    "spot": PoolOptions(cost=0.4, spot=True, max_replicas=10),
    "steady": PoolOptions(cost=1.0, max_replicas=20),
    "fast": PoolOptions(cost=4.0, speed=2.0, max_replicas=5),
}
THREE = ControllerOptions(pools=POOLS, scaling=EAGER)
RATE = 100.0  # tokens per second of a worker of speed 1


def seen(
    *, need: float, ready: dict[str, int], waits: float = 1.0, job_id: str = "a-1", **rollout: Any
) -> JobSignals:
    """A job whose trainer uses up so many workers' tokens, at a look that covers a step."""
    model = WorkloadModel(batch_groups=10, group_size=10)
    pools = {
        pool: PoolSignals(
            ready=count,
            warm=count,
            requests=10.0,
            open_requests=10.0 * count,
            tokens=RATE * THREE.pools[pool].speed * 60 * count if pool in POOLS else RATE * 60,
            busy_s=60.0 * count,
        )
        for pool, count in ready.items()
    }
    return JobSignals(
        job_id=job_id,
        spec=spec_of(model, **rollout),
        steps=4,
        step_s=240.0,
        wait_s=240.0 * waits,
        groups=40,
        tokens=need * RATE * 240.0,
        open_episodes=100,
        pools=pools,
    )


def settled(job: JobSignals, sizes: dict[str, int], options: ControllerOptions) -> Decision:
    """The decision after the same look many times, so that nothing is smoothed any more."""
    found = Decision(sizes, ScalingMemory(), {}, {})
    for turn in range(30):
        found = decide(
            Signals(seconds=60.0, jobs=(job,)),
            sizes,
            options=options,
            memory=found.memory,
            now_s=60.0 * turn,
        )
    return found


def names(counts: dict[str, int]) -> dict[str, int]:
    return {rollout_name("a-1", pool): count for pool, count in counts.items()}


def at_two_batch_sizes(job: JobSignals) -> JobSignals:
    """So that the model of a worker has a fixed part."""
    slow = PoolSignals(ready=1, warm=1, requests=40.0, tokens=RATE * 90, busy_s=60.0)
    return replace(job, pools={**job.pools, "steady": slow})


@pytest.mark.parametrize("lacks", [{"step_s": 0.0}, {"tokens": 0.0}])
def test_events_of_which_nothing_was_seen_are_not_planned_with(lacks: dict[str, float]) -> None:
    """Steps and groups are counted by the ledger; who made them may be new in the roster."""
    job = replace(at_two_batch_sizes(seen(need=5.0, ready={"spot": 1})), **lacks)
    found = settled(job, names({"spot": 1}), THREE)
    assert found.targets["a-1"].why.startswith("before the first step")
    assert sum(found.sizes.values()) >= 1


NEEDS = st.floats(0.1, 100)
COUNTS = st.fixed_dictionaries({"spot": st.integers(0, 10), "steady": st.integers(0, 20)}).filter(
    lambda counts: sum(counts.values()) > 0
)


@settings(max_examples=50, deadline=None)
@given(NEEDS, COUNTS, st.integers(1, 12), st.integers(0, 20), st.sampled_from([0.0, 1.0]))
def test_bounds_of_the_job_and_of_the_pools_are_kept(
    need: float, counts: dict[str, int], least: int, more: int, waits: float
) -> None:
    bounds = {"min_replicas": least, "max_replicas": least + more}
    job = seen(need=need, ready=counts, waits=waits, scaling=bounds, replicas=least)
    made = settled(job, names(counts), THREE).sizes
    assert least <= sum(made.values()) <= least + more
    for pool, options in POOLS.items():
        assert made[rollout_name("a-1", pool)] <= options.max_replicas


@settings(max_examples=50, deadline=None)
@given(st.lists(NEEDS, min_size=2, max_size=2), COUNTS)
def test_more_demand_never_gives_less(needs: list[float], counts: dict[str, int]) -> None:
    scaling = EAGER.model_copy(
        update={"scale_down_stabilization_s": 1e9}
    )  # nor is anybody moved to a cheaper pool
    options = THREE.model_copy(update={"scaling": scaling})

    def speed(need: float) -> float:
        made = settled(seen(need=need, ready=counts), names(counts), options).sizes
        return sum(POOLS[pool].speed * made[rollout_name("a-1", pool)] for pool in POOLS)

    low, high = sorted(needs)
    assert speed(low) <= speed(high)


@settings(max_examples=25, deadline=None)
@given(NEEDS, COUNTS, st.sampled_from([0.0, 1.0]))
def test_it_is_deterministic_and_comes_to_rest(
    need: float, counts: dict[str, int], waits: float
) -> None:
    job = seen(need=need, ready=counts, waits=waits)
    assert settled(job, names(counts), THREE) == settled(job, names(counts), THREE)
    there, before = counts, dict[str, int]()
    for _ in range(6):
        made = settled(seen(need=need, ready=there, waits=waits), names(there), THREE).sizes
        before, there = there, {pool: made[rollout_name("a-1", pool)] for pool in POOLS}
    assert there == before


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 40))
def test_the_cheapest_pools_come_first(need: float) -> None:
    made = settled(seen(need=need, ready={"steady": 1}), names({"steady": 1}), THREE).sizes
    spot, steady, fast = (made[rollout_name("a-1", pool)] for pool in POOLS)
    assert pools_of(spec_of(WorkloadModel()), THREE) == ["spot", "steady", "fast"]
    assert steady <= 1 or spot == 10
    assert fast == 0 or (spot == 10 and steady >= 18), "but for one that would be superfluous"


def test_some_workers_stay_where_they_are_never_taken_away() -> None:
    pools = {**POOLS, "steady": PoolOptions(cost=1.0, max_replicas=20, min_replicas=3)}
    options = ControllerOptions(pools=pools, scaling=EAGER)
    made = settled(seen(need=8.0, ready={"spot": 1}), names({"spot": 1}), options).sizes
    assert made == names({"spot": 6, "steady": 3, "fast": 0})


@settings(max_examples=50, deadline=None)
@given(NEEDS, NEEDS, st.integers(1, 30))
def test_jobs_share_pools_and_none_is_left_without(one: float, two: float, has: int) -> None:
    """The first has filled the pools; the second gets its least all the same."""
    options = ControllerOptions(pools={"default": PoolOptions(max_replicas=has)}, scaling=EAGER)
    first = seen(need=one, ready={"default": has}, job_id="a-1")
    second = seen(need=two, ready={}, job_id="b-1")
    sizes, memory = {"rollout-a-1": has}, ScalingMemory()
    for turn in range(30):
        signals = Signals(seconds=60.0, jobs=(first, second))
        made = decide(signals, sizes, options=options, memory=memory, now_s=60.0 * turn)
        sizes, memory = dict(made.sizes), made.memory
        assert sum(sizes.values()) <= has
    assert has == 1 or min(sizes.values()) >= 1


def test_a_job_of_fixed_size_is_not_scaled_and_keeps_its_capacity() -> None:
    options = ControllerOptions(pools={"default": PoolOptions(max_replicas=10)}, scaling=EAGER)
    fixed = seen(need=9.0, ready={"default": 4}, job_id="f-1", scaling=None, replicas=4)
    scaled = seen(need=50.0, ready={"default": 1})
    found = Decision({"rollout-a-1": 1}, ScalingMemory(), {}, {})
    for turn in range(30):
        found = decide(
            Signals(seconds=60.0, jobs=(fixed, scaled)),
            found.sizes,
            options=options,
            memory=found.memory,
            now_s=60.0 * turn,
        )
    assert found.sizes == {"rollout-a-1": 6}


def test_a_running_evaluation_keeps_its_workers() -> None:
    job = seen(need=1.0, ready={"spot": 10}, waits=0.0)
    assert sum(settled(job, names({"spot": 10}), THREE).sizes.values()) == 5  # half at a time
    assert settled(replace(job, measuring=True), names({"spot": 10}), THREE).sizes == names(
        {"spot": 10, "steady": 0, "fast": 0}
    )


def test_what_runs_keeps_the_workers_it_fills() -> None:
    job = seen(need=0.1, ready={"spot": 10}, waits=0.0, max_concurrent=10)
    assert sum(settled(job, names({"spot": 10}), THREE).sizes.values()) == 10


def test_workers_that_idle_are_not_what_a_trainer_waits_for() -> None:
    job = seen(need=20.0, ready={"spot": 2})
    idle = {"spot": replace(job.pools["spot"], idle_s=1200.0)}
    assert sum(settled(job, names({"spot": 2}), THREE).sizes.values()) > 2
    assert (
        settled(replace(job, pools=idle), names({"spot": 2}), THREE).sizes["rollout-a-1-spot"] == 2
    )


SHARED = ControllerOptions(
    scaling=ScalingOptions(
        idle_s=100.0,
        scale_down_stabilization_s=60.0,
        scale_up_cooldown_s=10.0,
        environment=EnvironmentScaling(max_replicas=8),
        reward=RewardScaling(max_replicas=20, queue_s=6.0),
    )
)


class Shared:
    """Decisions one after another, a look every five seconds."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.memory = ScalingMemory()
        self.now_s = 0.0

    def look(self, times: int = 1, *, options: ControllerOptions = SHARED, **signals: Any) -> None:
        for _ in range(times):
            found = decide(
                Signals(seconds=5.0, **signals),
                self.sizes,
                options=options,
                memory=self.memory,
                now_s=self.now_s,
            )
            self.sizes, self.memory = dict(found.sizes), found.memory
            self.now_s += 5.0


@pytest.fixture
def shared() -> Shared:
    return Shared()


def waiting(episodes: int) -> tuple[JobSignals, ...]:
    job = seen(need=1.0, ready={}, scaling=None)
    return (replace(job, open_episodes=0, headroom_groups=episodes // 10),)


def test_environment_workers_follow_the_episodes_that_want_to_run(shared: Shared) -> None:
    there = EnvironmentSignals(ready=1, slots=100)
    shared.look(20, jobs=waiting(400), environment=there)
    assert shared.sizes["environment"] == math.ceil(400 / 80)
    shared.look(20, jobs=waiting(100_000), environment=there)
    assert shared.sizes["environment"] == 8
    shared.look(8, jobs=waiting(100), environment=there)
    assert shared.sizes["environment"] == 8, "slowly"
    shared.look(60, jobs=waiting(100), environment=there)
    assert shared.sizes["environment"] == 2


def test_environment_workers_follow_their_processor_time(shared: Shared) -> None:
    shared.look(
        100, jobs=waiting(10), environment=EnvironmentSignals(ready=2, slots=1000, cpu_share=2.0)
    )
    assert shared.sizes["environment"] == 3


def test_reward_workers_follow_the_age_of_their_queue(shared: Shared) -> None:
    queue = RewardSignals(ready=1, pending=120, busy_s=5.0, scored=10.0)
    shared.look(20, jobs=waiting(10), reward=queue)
    assert shared.sizes["reward"] == 10


def test_shared_pools_scale_to_zero_without_jobs_and_back_immediately(shared: Shared) -> None:
    shared.look(jobs=waiting(10))
    assert shared.sizes == {"environment": 1, "reward": 1}
    shared.look(10)
    assert shared.sizes == {"environment": 1, "reward": 1}, "a next job may come soon"
    shared.look(12)
    assert shared.sizes == {"environment": 0, "reward": 0}
    shared.look(jobs=waiting(10))
    assert shared.sizes == {"environment": 1, "reward": 1}


def test_reward_workers_stay_while_an_answer_waits(shared: Shared) -> None:
    shared.look(40, reward=RewardSignals(ready=1, pending=1))
    assert shared.sizes == {"environment": 0, "reward": 1}


def test_what_is_not_scaled_is_not_decided(shared: Shared) -> None:
    shared.look(40, jobs=waiting(10_000), options=ControllerOptions())
    assert shared.sizes == {}


def test_jobs_that_are_over_are_forgotten() -> None:
    job = seen(need=5.0, ready={"spot": 2})
    found = settled(job, names({"spot": 2}), THREE)
    assert isinstance(found.memory.jobs["a-1"], JobMemory)
    after = decide(
        Signals(seconds=5.0), found.sizes, options=THREE, memory=found.memory, now_s=9999.0
    )
    assert after.sizes == {}
    assert after.memory.jobs == {}
