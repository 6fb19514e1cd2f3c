"""Rollout workers within the quotas of tenants, and shared fairly between them."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.quota import Quota
from paceline.config.sections.scaling import ScalingOptions
from paceline.config.service import ControllerOptions, PoolOptions
from paceline.front.api.tenants import Tenant
from paceline_controller.jobs.queue import PoolClaim
from paceline_controller.scaling.decide import Bounds, Decision, ScalingMemory, decide
from paceline_controller.scaling.signals import JobSignals, PoolSignals, Signals
from paceline_harness.scaling.rehearsal import spec_of
from paceline_harness.scaling.simulated import WorkloadModel

EAGER = ScalingOptions(
    scale_up_cooldown_s=0,
    scale_down_stabilization_s=0,
    max_scale_up=1000.0,
    warmup_s=0,
    requests_each=0.01,
)
ONE = ControllerOptions(pools={"default": PoolOptions(max_replicas=12)}, scaling=EAGER)
TWO = ControllerOptions(
    pools={"p": PoolOptions(cost=0.5, max_replicas=6), "q": PoolOptions(max_replicas=6)},
    scaling=EAGER,
)


def hungry(job_id: str, tenant: str, options: ControllerOptions = ONE) -> JobSignals:
    """A job that starves with any number of workers."""
    pool = PoolSignals(ready=12, warm=1, requests=10.0, tokens=6000.0, busy_s=60.0)
    return JobSignals(
        job_id=job_id,
        spec=spec_of(WorkloadModel(batch_groups=10, group_size=10)).model_copy(
            update={"tenant": tenant}
        ),
        steps=4,
        step_s=240.0,
        wait_s=960.0,
        groups=40,
        tokens=1e8,
        open_episodes=100,
        pools=dict.fromkeys(options.pools, pool),
    )


def quotas(**most: int | None) -> Bounds:
    return Bounds({name: Tenant(name, Quota(rollout_workers=n)) for name, n in most.items()})


def settled(
    jobs: list[JobSignals],
    sizes: dict[str, int],
    bounds: Bounds,
    *,
    options: ControllerOptions = ONE,
    turns: int = 30,
) -> dict[str, int]:
    """Sizes after many looks."""
    found = Decision(sizes, ScalingMemory(), {}, {})
    for turn in range(turns):
        found = decide(
            Signals(seconds=60.0, jobs=tuple(jobs)),
            found.sizes,
            options=options,
            memory=found.memory,
            bounds=bounds,
            now_s=60.0 * turn,
        )
    return dict(found.sizes)


def test_capacity_is_shared_between_tenants_not_between_jobs() -> None:
    jobs = [hungry(f"a-{i}", "a") for i in range(3)] + [hungry("b-1", "b")]
    made = settled(jobs, {"rollout-a-0": 12}, Bounds())
    assert made["rollout-b-1"] == 6
    assert sum(made.values()) == 12
    assert min(made.values()) >= 1


def test_a_weight_counts() -> None:
    bounds = Bounds({"a": Tenant("a", Quota(weight=3.0)), "b": Tenant("b")})
    made = settled([hungry("a-1", "a"), hungry("b-1", "b")], {"rollout-b-1": 12}, bounds)
    assert made == {"rollout-a-1": 9, "rollout-b-1": 3}


@settings(max_examples=30, deadline=None)
@given(
    most=st.integers(0, 14),
    jobs=st.integers(1, 3),
    options=st.sampled_from([ONE, TWO]),
    turns=st.integers(1, 12),
)
def test_the_quota_bounds_the_sum_of_a_tenant(
    most: int, jobs: int, options: ControllerOptions, turns: int
) -> None:
    mine = [hungry(f"a-{i}", "a", options) for i in range(jobs)]
    other = hungry("b-1", "b", options)
    made = settled([*mine, other], {}, quotas(a=most, b=None), options=options, turns=turns)
    held = sum(count for name, count in made.items() if name.startswith("rollout-a-"))
    assert held <= most
    assert sum(made.values()) <= 12


def test_a_quota_below_what_is_used_takes_nothing_away() -> None:
    sizes = {"rollout-a-1": 8}
    assert settled([hungry("a-1", "a")], sizes, quotas(a=3)) == sizes


def test_capacity_is_freed_for_a_queued_job_of_another_tenant() -> None:
    claim = PoolClaim("b-1", "b", "default", 5, pressing=False)
    bounds = replace(quotas(), claims=(claim,))
    assert settled([hungry("a-1", "a")], {"rollout-a-1": 12}, bounds) == {"rollout-a-1": 7}
