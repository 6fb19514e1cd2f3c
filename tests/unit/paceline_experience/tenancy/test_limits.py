"""Payloads above their limits cost their own group; evaluations come in by windows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import parse_job
from paceline.config.limits import LimitSettings
from paceline.config.quota import MAX_TRAJECTORY_BYTES, MIB, Quota
from paceline.enums import DropReason, GiveBackReason, JobState, TrackerState
from paceline.errors import LimitError, QuotaError
from paceline.platform.transport.rpc import MAX_MESSAGE_BYTES
from paceline.types import EpisodeProgress, Task, TrackerStatus
from paceline_experience.jobs.history import History
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.ledger.ledger import EpisodeKey
from paceline_experience.ledger.records import row_text
from paceline_experience.store.keys import JobKeys
from paceline_experience.tenancy.quotas import Quotas

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds


class Bad:
    """Every other task is wrong: too large, not text, no number, or it raises."""

    def __init__(self, size: int = 1000) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        task = Task(f"t{position}", "arithmetic", "{}", seed=position)
        match position % 8:
            case 1:
                return replace(task, payload="a" * 6_000_000)
            case 3:
                return replace(task, payload="\ud800")
            case 5:
                return replace(task, seed=1 << 70)
            case 7:
                raise RecursionError("too deep")
            case _:
                return task


class Huge(Bad):
    def __getitem__(self, position: int, /) -> Task:
        return Task(f"t{position}", "arithmetic", "a" * 300_000)


async def test_oversized_tasks_drop_only_their_groups(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience={"batch_groups": 16, "max_staleness": 0})
    world.tasks = Bad()
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=32, evals=0)
    good = {f"t{n}" for n in range(0, 1000, 2)}
    assert 0 < len(leased) < 16
    assert {a.task.task_id for a in leased} <= good
    counts = await world.clean(ledger)
    assert counts[DropReason.OVERSIZED] + counts[DropReason.INVALID] == 32 - 2 * len(leased)
    assert counts[DropReason.OVERSIZED] > 0
    assert counts[DropReason.INVALID] > 0
    assert counts["leased"] == 2 * len(leased)


async def test_a_job_with_only_oversized_tasks_fails_with_advice(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    world.tasks = Huge()
    ledger = await world.started()
    while not world.hooks.ends:
        assert await ledger.leases.lease(worker_id="w", train=8, evals=0) == []
        await ledger.sweep()
    [(state, reason)] = world.hooks.ends
    assert state == "failed"
    assert "limit task_bytes: 3000" in reason
    assert "is allowed 262144" in reason
    assert "paceline tenants set default --task-bytes" in reason
    await world.clean(ledger)


async def test_an_oversized_trajectory_drops_its_group(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    world.limits = LimitSettings(tenant=Quota(trajectory_bytes=4096))
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    long = replace(world.made(leased[0], 0), response_text="a" * 5000)
    assert await ledger.submit([long]) == ["dropped"]
    assert await ledger.submit(world.whole(leased[1:])) == ["accepted", "accepted"]
    counts = await world.clean(ledger)
    assert (counts[DropReason.OVERSIZED], counts["ready"]) == (2, 2)
    assert ledger.payload_bytes < 4096


async def test_oversized_progress_is_not_kept_and_its_lease_is(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    world.limits = LimitSettings(tenant=Quota(trajectory_bytes=4096))
    ledger = await world.started()
    [first, second] = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    told = [
        EpisodeProgress(first.group_id, 0, 1, (), actions=("a" * 5000,)),
        EpisodeProgress(second.group_id, 0, 1, (), actions=("b",)),
    ]
    world.clock.advance(8)
    assert await ledger.renew(worker_id="w", keys=[], progress=told) == []
    world.clock.advance(8)
    await ledger.sweep()  # the other two leases expire
    again = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    assert {(a.group_id, a.indices) for a in again} == {
        (first.group_id, (1,)),
        (second.group_id, (1,)),
    }
    drained = [EpisodeKey(a.group_id, 0, 1, GiveBackReason.DRAIN) for a in (first, second)]
    await ledger.give_back(worker_id="w", keys=drained)
    again = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    kept = {a.group_id: a.progress for a in again}
    assert kept[first.group_id] == ()
    assert [each.actions for each in kept[second.group_id]] == [("b",)]


async def test_what_environments_find_too_large_is_dropped_with_a_short_reason(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    [first, *_] = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    key = EpisodeKey(first.group_id, 0, 1, GiveBackReason.OVERSIZED, "é" * 1_000_000)
    await ledger.give_back(worker_id="w", keys=[key])
    assert (await world.clean(ledger))[DropReason.OVERSIZED] == 2
    kept = await store.command("HGET", "{default/j1}:meta", "invalid_detail")
    assert len(kept) <= 4096
    assert kept.endswith(b"(2000000 bytes in all)")


async def test_what_a_trainer_reports_is_bounded(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    said = {"loss": 1.0, **{f"m{n}": "x" * 100 for n in range(1000)}}
    await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics=said)
    [(_, row)] = world.hooks.of("train")
    assert row["oversized_bytes"] > 100_000
    assert "m0" not in row
    assert row["version"] == 0


async def held(world: World, ledger: JobLedger) -> int:
    """Episodes of evaluations that the store holds."""
    del ledger
    records = await world.store.command("HVALS", "{default/j1}:groups")
    return sum("version" in json.loads(text) for text in records)


async def test_a_large_evaluation_comes_in_by_windows(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval={"every": 2, "tasks": 100, "timeout_s": 50})
    world.num_eval_tasks, world.limits = 100, LimitSettings(eval_window=8)
    ledger = await world.started()
    seen: list[str] = []
    while not world.hooks.of("eval"):
        leased = await ledger.leases.lease(worker_id="w", train=0, evals=3)
        assert await held(world, ledger) <= 8
        seen += [a.task.task_id for a in leased]
        await ledger.submit([world.made(a, 0, reward=len(seen) % 2) for a in leased])
        told = (await ledger.live()).eval
        if len(seen) < 100:
            assert told is not None
            assert told.total == told.measured + told.open == 100
        if len(seen) % 5 == 0:
            ledger = await world.opened()  # a restart forgets nothing
        await ledger.sweep()
    assert sorted(seen) == sorted(f"t{n}" for n in range(100))
    [(_, row)] = world.hooks.of("eval")
    assert (row["measured"], row["dropped"], row["tokens"]) == (100, 0, 300)
    page, _ = await ledger.trajectories.page(purpose="eval", page_size=200, page_token="")
    assert len(page) == 100
    assert (await world.clean(ledger))["admitted"] == 0


async def test_the_time_of_a_windowed_evaluation_ends_it(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval={"every": 2, "tasks": 100, "timeout_s": 50})
    world.num_eval_tasks, world.limits = 100, LimitSettings(eval_window=8)
    ledger = await world.started()
    for _ in range(3):
        leased = await ledger.leases.lease(worker_id="w", train=0, evals=8)
        await ledger.submit([world.made(a, 0, reward=1.0) for a in leased])
        await ledger.sweep()
    world.clock.advance(51)
    await ledger.sweep()
    [(_, row)] = world.hooks.of("eval")
    assert (row["measured"], row["dropped"], row["reward"]) == (24, 76, 1.0)
    assert await held(world, ledger) == 0
    await world.clean(ledger)


async def test_reasons_are_cut_off(store: Store, worlds: Worlds) -> None:
    spec = worlds(store).spec
    jobs = JobStore(store, limits=LimitSettings(reason_bytes=100))
    job = await jobs.create(JobParts(spec), artifacts={})
    job = await jobs.cancel(job.status.job_id, reason="x" * 2_000_000)
    assert len(job.status.reason) == 100
    assert job.status.reason.endswith("(2000000 bytes in all)")
    loud = TrackerStatus(
        "wandb", "wandb", TrackerState.RETRYING, detail="y" * 10_000, url="z" * 10_000
    )
    await jobs.note_tracker(job.status.job_id, loud)
    [told] = (await jobs.get(job.status.job_id)).status.tracking
    assert (len(told.detail), len(told.url)) == (100, 100)
    job = await jobs.transition(job.status.job_id, JobState.FAILED, reason="\ud800")
    assert job.status.reason == "?"


async def test_the_number_of_jobs_per_tenant_is_limited_by_default(
    store: Store, worlds: Worlds
) -> None:
    max_live = Quotas(LimitSettings()).of("default").submitted
    assert max_live == 100
    jobs = JobStore(store)
    spec = worlds(store).spec
    for _ in range(max_live):
        await jobs.create(JobParts(spec), artifacts={}, max_live=max_live)
    with pytest.raises(
        QuotaError, match=r"100 jobs that are not over, of 100 allowed.*set default"
    ):
        await jobs.create(JobParts(spec), artifacts={}, max_live=max_live)


def test_the_largest_of_each_size_is_remembered_with_what_holds_for_a_tenant() -> None:
    now = [1000.0]
    quotas = Quotas(LimitSettings(tenant=Quota(task_bytes=10)), clock=lambda: now[0])
    quotas.own["b"] = Quota(task_bytes=20)
    found: dict[str, Any] = {}
    for tenant in "ab":
        found[tenant] = [quotas.excess(tenant, "task_bytes", size) for size in (9, 15, 3)]
    assert [bool(text) for text in found["a"]] == [False, True, False]
    assert found["b"] == ["", "", ""]
    with pytest.raises(LimitError, match=r"task_bytes: 11 bytes.*'a' is allowed 10.*--task-bytes"):
        quotas.check("a", "task_bytes", 11)
    largest: list[dict[str, int]] = []
    for _ in range(3):
        largest.append(quotas.largest("a"))
        now[0] += 3600
    assert largest == [{"task_bytes": 15}, {"task_bytes": 15}, {}]


def test_a_page_with_its_last_item_fits_into_a_message() -> None:
    page = LimitSettings.model_json_schema()["properties"]["page_bytes"]["maximum"]
    assert page + MAX_TRAJECTORY_BYTES + MIB <= MAX_MESSAGE_BYTES


async def test_lists_of_jobs_have_no_specs_and_end_by_bytes(store: Store, worlds: Worlds) -> None:
    spec = worlds(store, tracking=[{"kind": "tensorboard"}]).spec
    jobs = JobStore(store, limits=LimitSettings(page_bytes=64 << 10))
    made = [await jobs.create(JobParts(spec), artifacts={}) for _ in range(60)]
    for job in made:
        await jobs.cancel(job.status.job_id, reason="x" * 4096)
    assert b"spec" not in await store.command(
        "HKEYS", f"{{default/{made[0].status.job_id}}}:record"
    )
    seen: list[str] = []
    token, pages = "", 0
    while pages == 0 or token:
        page = await jobs.list_page(page_size=1000, page_token=token)
        assert {job.spec for job in page.jobs} == {""}
        assert len(page.jobs) <= 16
        seen += [job.status.job_id for job in page.jobs]
        token, pages = page.token, pages + 1
    assert seen == [job.status.job_id for job in reversed(made)]
    assert (await jobs.get(seen[0])).spec == spec.model_dump_json()
    [waits] = made[0].status.tracking
    assert (waits.name, waits.state) == ("tensorboard", "waiting")


async def test_pages_of_trajectories_end_by_bytes(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval={"every": 2, "tasks": 4, "timeout_s": 50})
    world.limits = LimitSettings(page_bytes=64 << 10)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=4)
    long = [replace(world.made(a, 0), response_text=str(n) * 40_000) for n, a in enumerate(leased)]
    await ledger.submit(long)
    await ledger.sweep()
    seen: list[str] = []
    token, sizes = "", list[int]()
    while not sizes or token:
        page, token = await ledger.trajectories.page(purpose="eval", page_size=9, page_token=token)
        sizes.append(len(page))
        seen += [each.response_text[0] for each in page]
    assert sizes[:2] == [2, 2]
    assert seen == ["3", "2", "1", "0"]


async def test_pages_of_rows_end_by_bytes(store: Store, worlds: Worlds, tmp_path: Path) -> None:
    job = await JobStore(store).create(JobParts(worlds(store).spec), artifacts={})
    history = History(store, tmp_path)
    key = JobKeys("default", job.status.job_id).metrics
    for step in range(100):
        row = row_text(step=step, kind="train", values={"x": "y" * 1000})
        await store.command("RPUSH", key, row)
    assert len(await history.page(job, after=0, limit=500, max_bytes=70_000)) in range(66, 71)
    assert [r.step for r in await history.page(job, after=97, limit=9, max_bytes=9000)] == [
        97,
        98,
        99,
    ]
    assert len(await history.page(job, after=0, limit=5, max_bytes=1 << 20)) == 5
    assert await history.count(job) == 100


@pytest.mark.parametrize(
    ("evals", "field"),
    [
        ({"eval": {"tasks": 400_000}}, "eval.tasks: 400000"),
        ({"eval": {"tasks": 900, "samples": 1000, "temperature": 1.0}}, "eval.tasks: 900"),
        (
            {"evals": {"a": {"tasks": 100}, "b": {"tasks": 65_500}}},
            "evals.b.tasks: 65500 tasks of 1 samples make 65600",
        ),
        ({"eval": {"tasks": 65_536}}, ""),
        ({"eval": {"tasks": 64, "samples": 1024, "temperature": 1.0}}, ""),
    ],
)
def test_evaluations_of_a_job_are_bounded_together(evals: dict[str, Any], field: str) -> None:
    spec = parse_job(
        {
            "name": "x",
            "model": {"path": "m"},
            "tasks": {"environment": "arithmetic"},
            "reward": [{"kind": "exact"}],
            **evals,
        }
    )
    if not field:
        Quotas(LimitSettings()).check_evals(spec.eval_sets)
        return
    with pytest.raises(LimitError, match=rf"^{field}.* allows 65536.*limits.eval_episodes"):
        Quotas(LimitSettings()).check_evals(spec.eval_sets)
    Quotas(LimitSettings(eval_episodes=1 << 20)).check_evals(spec.eval_sets)
