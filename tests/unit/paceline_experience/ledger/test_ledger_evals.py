"""Eval runs, stop conditions and the end of a job."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from paceline.data import JobData
from paceline.enums import GiveBackReason
from paceline.errors import InvalidError
from paceline_experience.ledger.ledger import EpisodeKey
from paceline_experience.ledger.sources import try_plugins

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

EVAL: dict[str, Any] = {"every": 2, "tasks": 3, "timeout_s": 50}


async def measured(world: World, ledger: JobLedger, reward: float) -> int:
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=10)
    await ledger.submit([world.made(a, 0, reward=reward) for a in leased])
    await ledger.sweep()
    return len(leased)


async def steps(world: World, ledger: JobLedger, count: int, *, start: int = 0) -> None:
    for step in range(start, start + count):
        await world.filled(ledger, version=(await ledger.live()).version)
        await world.trained(ledger, step)


async def test_version_0_is_measured_outside_the_identity(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    assert ledger.evals.held_version() == 0
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=2)
    assert [(a.purpose, a.pinned_version, a.indices) for a in leased] == [("eval", 0, (0,))] * 2
    await ledger.submit([world.made(a, 0, reward=1.0) for a in leased])
    assert await measured(world, ledger, 0.0) == 1
    [(step, row)] = world.hooks.of("eval")
    assert (step, row["version"], row["measured"], row["dropped"]) == (0, 0, 3, 0)
    assert row["reward"] == pytest.approx(2 / 3)
    assert ledger.evals.held_version() == -1
    assert (await world.clean(ledger))["admitted"] == 0
    page, _ = await ledger.trajectories.page(purpose="eval", page_size=9, page_token="")
    assert len(page) == 3


async def test_the_same_tasks_and_seeds_every_time(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    first = await ledger.leases.lease(worker_id="w", train=0, evals=9)
    await ledger.submit([world.made(a, 0) for a in first])
    await ledger.sweep()
    await steps(world, ledger, 2)
    second = await ledger.leases.lease(worker_id="w", train=0, evals=9)
    assert [(a.task, a.seed) for a in first] == [(a.task, a.seed) for a in second]
    assert {a.pinned_version for a in second} == {2}


async def test_what_is_not_measured_in_time_is_dropped(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    world.clock.advance(40)
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=9)
    await ledger.submit([world.made(leased[0], 0, reward=1.0)])
    gone = EpisodeKey(leased[1].group_id, 0, 1, GiveBackReason.VERSION_GONE)
    await ledger.give_back(worker_id="w", keys=[gone])
    await ledger.sweep()
    world.clock.advance(40)  # the time runs from the first lease
    await ledger.sweep()
    assert world.hooks.of("eval") == []
    world.clock.advance(11)
    await ledger.sweep()
    [(_, row)] = world.hooks.of("eval")
    assert (row["reward"], row["measured"], row["dropped"]) == (1.0, 1, 2)
    await world.clean(ledger)


async def test_a_run_that_becomes_due_meanwhile_measures_the_newest(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    await steps(world, ledger, 3)
    assert ledger.evals.held_version() == 0
    assert await measured(world, ledger, 0.0) == 3
    assert ledger.evals.held_version() == 3
    ledger = await world.opened()
    assert ledger.evals.held_version() == 3
    assert await measured(world, ledger, 1.0) == 3
    assert [step for step, _ in world.hooks.of("eval")] == [0, 3]


async def test_a_job_ends_after_the_last_eval(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval=EVAL, stop={"steps": 3})
    ledger = await world.started()
    await measured(world, ledger, 0.25)
    await steps(world, ledger, 2)
    await measured(world, ledger, 0.5)
    await world.filled(ledger, version=2)
    share = await ledger.take(incarnation=1, step=2, rank=0, world=1)
    answer = await ledger.commit(incarnation=1, step=2, batch_id=share.batch_id, metrics={})
    assert answer == (3, "finished")
    await ledger.sweep()
    assert world.hooks.ends == []
    assert await ledger.leases.lease(worker_id="w", train=9, evals=0) == []
    await ledger.publish_version(incarnation=1, step=3, parent=2, num_bytes=1)
    assert (await ledger.take(incarnation=1, step=3, rank=0, world=1)).stop == "finished"
    ledger = await world.opened()
    await measured(world, ledger, 0.75)
    await ledger.sweep()
    assert world.hooks.ends == [("succeeded", "all steps are done")]
    await ledger.sweep()
    assert len(world.hooks.ends) == 1
    live = await ledger.live()
    assert (live.eval_reward_start, live.eval_reward, live.eval_step) == (0.25, 0.75, 3)
    counts = await world.clean(ledger)
    assert counts["queued"] == counts["ready"] == 0


async def test_the_eval_reward_ends_a_job(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval=EVAL, stop={"steps": 100, "eval_reward": 0.9})
    ledger = await world.started()
    await measured(world, ledger, 1.0)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert (share.stop, share.samples) == ("finished", ())
    await ledger.sweep()
    assert world.hooks.ends == [("succeeded", "the eval reward is reached")]


async def test_the_wall_clock_ends_a_job(store: Store, worlds: Worlds) -> None:
    world = worlds(store, stop={"steps": 100, "wall_s": 60})
    ledger = await world.started()
    await world.filled(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    world.clock.advance(61)
    await ledger.sweep()
    answer = await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
    assert answer == (1, "finished")
    await ledger.publish_version(incarnation=1, step=1, parent=0, num_bytes=1)
    await ledger.sweep()
    assert world.hooks.ends == [("succeeded", "the time is over")]
    assert (await world.clean(ledger))["surplus"] == 4


async def test_the_end_of_the_tasks_ends_a_job(store: Store, worlds: Worlds) -> None:
    world = worlds(store, num_tasks=3, tasks={"environment": "x", "epochs": 1})
    ledger = await world.started()
    await world.filled(ledger)
    await ledger.sweep()
    await world.trained(ledger, 0)
    assert await ledger.leases.lease(worker_id="w", train=9, evals=0) == []
    assert (await ledger.take(incarnation=1, step=1, rank=0, world=1)).stop == "finished"
    await ledger.sweep()
    assert world.hooks.ends == [("succeeded", "all epochs of the tasks are over")]


async def test_a_job_that_ends_before_its_first_step_is_no_success(
    store: Store, worlds: Worlds
) -> None:
    """One group of the two that a batch needs."""
    world = worlds(store, num_tasks=1, tasks={"environment": "x", "epochs": 1}, stop={"steps": 50})
    ledger = await world.started()
    await world.filled(ledger)
    await ledger.sweep()
    assert (await ledger.take(incarnation=1, step=0, rank=0, world=1)).stop == "finished"
    await ledger.sweep()
    ((outcome, reason),) = world.hooks.ends
    assert outcome == "failed"
    assert reason.startswith("all epochs of the tasks are over, and nothing was trained")
    assert "experience.batch_groups" in reason


async def test_time_that_is_over_before_the_first_step_is_no_success(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, stop={"steps": 100, "wall_s": 60})
    ledger = await world.started()
    world.clock.advance(61)
    await ledger.sweep()
    assert (await ledger.take(incarnation=1, step=0, rank=0, world=1)).stop == "finished"
    await ledger.sweep()
    ((outcome, reason),) = world.hooks.ends
    assert (outcome, reason[:16]) == ("failed", "the time is over")


@pytest.mark.parametrize(
    ("num_tasks", "epochs", "enough"), [(1, 1, False), (1, 2, True), (2, 1, True)]
)
async def test_a_batch_that_all_epochs_cannot_fill_is_refused(
    store: Store, worlds: Worlds, num_tasks: int, epochs: int, enough: bool
) -> None:
    tasks = {"environment": "guess_number", "options": {"size": num_tasks}, "epochs": epochs}
    spec = worlds(store, tasks=tasks).spec
    assert spec.experience.batch_groups == 2
    told = r"experience\.batch_groups: 2, but tasks\.epochs 1 of 1 tasks has only 1 groups"
    with nullcontext() if enough else pytest.raises(InvalidError, match=told):
        await asyncio.to_thread(try_plugins, spec, JobData())


async def test_a_trainer_that_dies_at_the_end_trains_the_last_steps_again(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, stop={"steps": 2})
    ledger = await world.started()
    await steps(world, ledger, 2)
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=0)
    await ledger.publish_version(incarnation=incarnation, step=0, parent=2, num_bytes=1)
    await ledger.sweep()
    assert world.hooks.ends == []
    for step in range(2):
        await world.trained(ledger, step, incarnation=incarnation)
    await ledger.sweep()
    assert [state for state, _ in world.hooks.ends] == ["succeeded"]


async def test_cancelling_drops_everything_untrained(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    await ledger.leases.lease(worker_id="w", train=0, evals=1)
    leased = await world.filled(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    await ledger.completion.cancel()
    counts = await world.clean(ledger)
    assert counts["cancelled"] == counts["dropped"] == counts["admitted"] == 2 * len(leased)
    assert ledger.evals.held_version() == -1
    answer = await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
    assert answer == (0, "cancelled")
    assert (await ledger.take(incarnation=1, step=0, rank=0, world=1)).stop == "cancelled"
    assert await ledger.leases.lease(worker_id="w", train=9, evals=9) == []


async def test_a_paused_job_resumes(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    await ledger.pauses.begin()
    assert (await ledger.take(incarnation=1, step=0, rank=0, world=1)).stop == "paused"
    await ledger.pauses.hold()
    assert await ledger.grant_incarnation() == 2
    assert await ledger.rewind(incarnation=2, step=0) == (0, 0)
    await ledger.publish_version(incarnation=2, step=0, parent=0, num_bytes=10)
    await world.trained(ledger, 0, incarnation=2)
    await world.clean(ledger)


async def measured_partly(world: World, ledger: JobLedger, *, share: float, reward: float) -> None:
    """Measure a share of the open run and let its time pass."""
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=100)
    await ledger.sweep()
    count = round(share * len(leased))
    await ledger.submit([world.made(a, 0, reward=reward) for a in leased[:count]])
    world.clock.advance(60)
    await ledger.sweep()


async def test_an_eval_that_measured_too_little_is_no_result(store: Store, worlds: Worlds) -> None:
    run = {"every": 1, "tasks": 10, "timeout_s": 50}
    world = worlds(store, eval=run, stop={"steps": 100, "eval_reward": 0.9})
    world.num_eval_tasks = 10
    ledger = await world.started()
    await measured_partly(world, ledger, share=0.8, reward=1.0)
    [(_, row)] = world.hooks.of("eval")
    told = ("reward", "measured", "of", "complete")
    assert [row[name] for name in told] == [1.0, 8, 10, False]
    live = await ledger.live()
    assert [getattr(live.eval_last, name) for name in told] == [1.0, 8, 10, False]
    results = ("eval_reward_start", "eval_reward", "eval_step")
    assert [getattr(live, name) for name in results] == [None] * 3
    assert not ledger.stopping
    await steps(world, ledger, 1)
    await measured_partly(world, ledger, share=0.9, reward=0.5)
    await steps(world, ledger, 1, start=1)
    await measured_partly(world, ledger, share=0.0, reward=0.0)
    ledger = await world.opened()
    live = await ledger.live()
    assert [getattr(live, name) for name in results] == [0.5, 0.5, 1]
    assert [getattr(live.eval_last, name) for name in told] == [None, 0, 10, False]
    assert [row["complete"] for _, row in world.hooks.of("eval")] == [False, True, False]
    await world.clean(ledger)


async def test_a_task_that_an_endpoint_denies_ends_the_job(store: Store, worlds: Worlds) -> None:
    """The first reason stays, whatever is told of other tasks."""
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=2)
    for each, detail in zip(leased, ("HTTP 401: no", "another"), strict=True):
        key = EpisodeKey(each.group_id, 0, each.attempts[0], GiveBackReason.DENIED, detail)
        await ledger.give_back(worker_id="w", keys=[key])
    assert await ledger.leases.lease(worker_id="w", train=8, evals=9) == []
    await ledger.sweep()
    assert world.hooks.ends == [("failed", "HTTP 401: no")]
