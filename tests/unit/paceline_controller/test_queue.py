import random
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import parse_job
from paceline.config.quota import Quota
from paceline.config.service import ControllerOptions, PoolOptions
from paceline.enums import JobState
from paceline.front.api.tenants import Tenant, TenantUsage
from paceline_controller.jobs.plan import LiveJob
from paceline_controller.jobs.queue import Queue, needs, schedule

PATIENCE_S = 600.0
TENANTS = ("a", "b", "c")


def options(**most: int) -> ControllerOptions:
    pools = {name: PoolOptions(max_replicas=count) for name, count in (most or {"p": 8}).items()}
    return ControllerOptions(pools=pools, backfill_after_s=PATIENCE_S)


def job(
    name: str,
    tenant: str = "a",
    *,
    age_s: float = 0.0,
    state: JobState = JobState.QUEUED,
    **rollout: Any,
) -> LiveJob:
    raw = {
        "name": "j",
        "tenant": tenant,
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
        "rollout": rollout,
    }
    return LiveJob(name, state, 0, parse_job(raw), age_s=age_s)


def tenant(name: str = "a", *, episodes: int = 0, **limits: Any) -> dict[str, Tenant]:
    return {name: Tenant(name, Quota(**limits), usage=TenantUsage(episodes=episodes))}


BASE = {replicas: job("base", replicas=replicas).spec for replicas in range(1, 10)}
OWNED = {
    (name, replicas): spec.model_copy(update={"tenant": name})
    for name in TENANTS
    for replicas, spec in BASE.items()
}


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[LiveJob], dict[str, dict[str, int]], dict[str, Tenant]]:
    """Jobs of three tenants, those that run within the pool."""
    jobs: list[LiveJob] = []
    held: dict[str, dict[str, int]] = {}
    free = 8
    for number in range(draw(st.integers(0, 10))):
        replicas = draw(st.integers(1, 9))
        runs = draw(st.booleans()) and replicas <= free
        found = LiveJob(
            f"j{number}",
            JobState.RUNNING if runs else JobState.QUEUED,
            0,
            OWNED[draw(st.sampled_from(TENANTS)), replicas],
            age_s=draw(st.sampled_from([0.0, 10.0, 599.0, 600.0, 5000.0])),
        )
        jobs.append(found)
        if runs:
            free -= replicas
            held[found.job_id] = {"p": replicas}
    limit = st.none() | st.integers(0, 9)
    tenants = {
        name: Tenant(
            name,
            Quota(
                jobs=draw(limit),
                rollout_workers=draw(limit),
                weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
            ),
            usage=TenantUsage(episodes=draw(st.integers(0, 50))),
        )
        for name in draw(st.sets(st.sampled_from(TENANTS)))
    }
    return jobs, held, tenants


Case = tuple[list[LiveJob], dict[str, dict[str, int]], dict[str, Tenant]]


def totals(jobs: list[LiveJob], found: Queue) -> tuple[Counter[str], Counter[str], int]:
    """Jobs and workers by tenant, and workers in all, once those have started."""
    count: Counter[str] = Counter()
    workers: Counter[str] = Counter()
    for each in jobs:
        if each.state is not JobState.QUEUED or each.job_id in found.starts:
            count[each.spec.tenant] += 1
            workers[each.spec.tenant] += each.spec.rollout.replicas
    return count, workers, workers.total()


@given(queues())
def test_no_quota_and_no_pool_is_exceeded(case: Case) -> None:
    jobs, held, tenants = case
    found = schedule(jobs, held, tenants, options())
    before_jobs, before_workers, _ = totals(jobs, Queue())
    count, workers, total = totals(jobs, found)
    assert total <= 8
    for name, each in tenants.items():
        for now, before, most in (
            (count[name], before_jobs[name], each.quota.jobs),
            (workers[name], before_workers[name], each.quota.rollout_workers),
        ):
            assert most is None or now <= max(before, most)
            assert most is None or before < most or now == before


@given(queues())
def test_every_queued_job_starts_or_has_a_reason(case: Case) -> None:
    jobs, held, tenants = case
    found = schedule(jobs, held, tenants, options())
    queued = {each.job_id for each in jobs if each.state is JobState.QUEUED}
    assert {*found.starts} | {*found.waits} == queued
    assert len(found.starts) + len(found.waits) == len(queued)
    for job_id, why in found.waits.items():
        owner = next(each.spec.tenant for each in jobs if each.job_id == job_id)
        assert "position" in why
        assert f"of tenant {owner!r}" in why


@given(queues())
def test_no_capacity_stays_idle_that_an_unblocked_job_could_use(
    case: Case,
) -> None:
    jobs, held, tenants = case
    jobs = [replace(each, age_s=min(each.age_s, 599.0)) for each in jobs]
    found = schedule(jobs, held, tenants, options())
    count, workers, total = totals(jobs, found)
    for each in jobs:
        if each.job_id in found.waits:
            name = each.spec.tenant
            quota = tenants.get(name, Tenant(name)).quota
            full = quota.jobs is not None and count[name] >= quota.jobs
            most, need = quota.rollout_workers, needs(each)
            assert full or total + need > 8 or (most is not None and workers[name] + need > most)


@given(queues(), st.randoms(use_true_random=False))
def test_the_order_of_jobs_changes_nothing(case: Case, chance: random.Random) -> None:
    jobs, held, tenants = case
    shuffled = list(jobs)
    chance.shuffle(shuffled)
    assert schedule(jobs, held, tenants, options()) == schedule(shuffled, held, tenants, options())


@settings(deadline=None)
@given(
    needs_of=st.lists(st.integers(1, 8), min_size=2, max_size=3),
    lives=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_no_tenant_starves(needs_of: list[int], lives: int, seed: int) -> None:
    """Each tenant always has more jobs waiting; all that start end some time later."""
    chance = random.Random(seed)
    names = TENANTS[: len(needs_of)]
    started: Counter[str] = Counter()
    running: dict[str, tuple[LiveJob, int]] = {}
    waiting: list[LiveJob] = []
    born = 0
    for now in range(80):
        for name, need in zip(names, needs_of, strict=True):
            while sum(each.spec.tenant == name for each in waiting) < 3:
                waiting.append(LiveJob(f"j{born:04}", JobState.QUEUED, 0, OWNED[name, need]))
                born += 1
        waiting = [replace(each, age_s=each.age_s + 100.0) for each in waiting]
        running = {n: (each, end) for n, (each, end) in running.items() if end > now}
        held = {n: {"p": each.spec.rollout.replicas} for n, (each, _) in running.items()}
        jobs = [*waiting, *(each for each, _ in running.values())]
        for job_id in schedule(jobs, held, {}, options()).starts:
            each = next(each for each in waiting if each.job_id == job_id)
            waiting.remove(each)
            started[each.spec.tenant] += 1
            end = now + 1 + chance.randrange(lives)
            running[job_id] = (replace(each, state=JobState.RUNNING), end)
    oldest = max((each.age_s for each in waiting), default=0.0)
    assert oldest <= PATIENCE_S + 100.0 * (lives + 1) * 3 * len(names)
    assert all(started[name] for name in names)


def test_the_tenant_that_has_least_comes_first() -> None:
    jobs = [
        job("a1", "a", state=JobState.RUNNING, replicas=4),
        job("a2", "a", age_s=50, replicas=4),
        job("b1", "b", age_s=5, replicas=4),
    ]
    held = {"a1": {"p": 4}}
    assert schedule(jobs, held, {}, options()).starts == ("b1",)
    weighty = tenant("a", weight=100.0) | {"b": Tenant("b", usage=TenantUsage(episodes=100))}
    assert schedule(jobs, held, weighty, options()).starts == ("a2",)


def test_of_a_tenant_the_oldest_job_comes_first() -> None:
    jobs = [job("new", age_s=1), job("old", age_s=9), job("mid", age_s=5)]
    found = schedule(jobs, {}, tenant(jobs=1), options())
    assert found.starts == ("old",)
    assert found.waits == {
        "mid": "waits in position 2 of 3 of tenant 'a': quota jobs: 1 of 1 run",
        "new": "waits in position 3 of 3 of tenant 'a': quota jobs: 1 of 1 run",
    }


def test_nothing_new_starts_above_a_quota_that_was_lowered() -> None:
    jobs = [job(f"r{i}", state=JobState.RUNNING) for i in range(3)] + [job("next")]
    found = schedule(jobs, {f"r{i}": {"p": 1} for i in range(3)}, tenant(jobs=2), options())
    assert found.starts == ()
    assert "quota jobs: 3 of 2 run" in found.waits["next"]


def test_rollout_workers_of_a_tenant_are_bounded_over_its_jobs() -> None:
    jobs = [job("r", state=JobState.RUNNING, replicas=3), job("large", age_s=9, replicas=3)]
    jobs.append(job("small", replicas=2))
    found = schedule(jobs, {"r": {"p": 3}}, tenant(rollout_workers=5), options())
    assert found.starts == ("small",)
    assert "quota rollout_workers: 3 of 5 are in use, and it needs 3" in found.waits["large"]
    never = schedule([job("j", replicas=6)], {}, tenant(rollout_workers=5), options())
    assert "it needs 6 rollout workers, and quota rollout_workers is 5" in never.waits["j"]


def test_a_job_that_has_waited_long_is_not_overtaken() -> None:
    jobs = [
        job("r", "b", state=JobState.RUNNING, replicas=5),
        job("large", age_s=PATIENCE_S - 1, replicas=4),
        job("small", replicas=1),
    ]
    held = {"r": {"p": 5}}
    assert schedule(jobs, held, {}, options()).starts == ("small",)
    jobs[1] = replace(jobs[1], age_s=PATIENCE_S)
    found = schedule(jobs, held, {}, options())
    assert found.starts == ()
    assert [(claim.job_id, claim.pressing) for claim in found.claims] == [
        ("large", True),
        ("small", False),
    ]


def test_a_job_that_can_never_fit_keeps_nothing_from_others() -> None:
    jobs = [job("huge", age_s=9 * PATIENCE_S, replicas=9), job("small", replicas=1)]
    found = schedule(jobs, {}, {}, options())
    assert found.starts == ("small",)
    assert "it needs 9 rollout workers, and pool p has 8 at most" in found.waits["huge"]
    assert not found.claims


def test_a_job_that_is_scaled_starts_with_its_least_in_any_of_its_pools() -> None:
    scaled = job("s", replicas=6, scaling={"min_replicas": 2, "max_replicas": 8})
    assert needs(scaled) == 2
    two = options(p=1, q=1)
    assert schedule([scaled], {}, {}, two).starts == ("s",)
    fixed = job("f", replicas=2)
    assert schedule([fixed], {}, {}, two).starts == ()
