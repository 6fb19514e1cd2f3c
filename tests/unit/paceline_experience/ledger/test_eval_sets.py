"""Several evaluations of a job: their intervals, samples, results, and what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config.limits import LimitSettings
from paceline.enums import ScoreStatus
from paceline.types import EpisodeProgress

if TYPE_CHECKING:
    from paceline.types import Assignment, Trajectory
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

SAMPLED: dict[str, Any] = {"samples": 4, "temperature": 1.0, "pass_at": [1, 4], "majority_at": [3]}


def whole(world: World, leased: list[Assignment], reward: float) -> list[Trajectory]:
    return [world.made(a, i, reward=reward) for a in leased for i in range(len(a.indices))]


def answered(made: Trajectory, answer: str) -> Trajectory:
    return replace(made, score=replace(made.score, normalised_answer=answer))


async def measured(world: World, ledger: JobLedger, reward: float) -> list[Assignment]:
    """Measure all of the open run, and close it."""
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=100)
    await ledger.submit(whole(world, leased, reward))
    return leased


async def steps(world: World, ledger: JobLedger, count: int, *, start: int = 0) -> None:
    for step in range(start, start + count):
        await world.filled(ledger, version=(await ledger.live()).version)
        await world.trained(ledger, step)


def rows(world: World) -> list[tuple[int, str, float]]:
    return [(step, row.get("set", ""), row["reward"]) for step, row in world.hooks.of("eval")]


async def test_each_evaluation_has_its_interval(store: Store, worlds: Worlds) -> None:
    evals = {"often": {"every": 1, "tasks": 2}, "seldom": {"every": 2, "tasks": 3, "seed": 9}}
    world = worlds(store, evals=evals)
    ledger = await world.started()
    first = await measured(world, ledger, 0.25)
    assert ledger.evals.held_version() == 0  # the second one measures the same version
    second = await measured(world, ledger, 0.5)
    assert ledger.evals.held_version() == -1
    assert [(len(a), a[0].eval_set) for a in (first, second)] == [(2, "often"), (3, "seldom")]
    assert first[0].seed != second[0].seed
    await steps(world, ledger, 1)
    await measured(world, ledger, 0.5)
    await steps(world, ledger, 1, start=1)
    await measured(world, ledger, 0.75)
    ledger = await world.opened()
    await measured(world, ledger, 1.0)
    await ledger.sweep()
    assert rows(world) == [
        (0, "often", 0.25),
        (0, "seldom", 0.5),
        (1, "often", 0.5),
        (2, "often", 0.75),
        (2, "seldom", 1.0),
    ]
    live = await ledger.live()
    assert (live.eval_reward_start, live.eval_reward, live.eval_step) == (0.25, 0.75, 2)
    told = [(e.name, e.reward_start, e.reward, e.step, e.last.version) for e in live.evals]
    assert told == [("often", 0.25, 0.75, 2, 2), ("seldom", 0.5, 1.0, 2, 2)]
    await world.clean(ledger)


async def test_what_becomes_due_meanwhile_measures_the_newest(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval={"every": 2, "tasks": 2}, evals={"b": {"every": 3, "tasks": 1}})
    ledger = await world.started()
    await steps(world, ledger, 3)
    assert [a.eval_set for a in await measured(world, ledger, 0.0)] == ["", ""]
    assert [a.pinned_version for a in await measured(world, ledger, 0.0)] == [0]
    ledger = await world.opened()
    assert [a.pinned_version for a in await measured(world, ledger, 0.0)] == [3, 3]
    assert [a.pinned_version for a in await measured(world, ledger, 0.0)] == [3]
    await ledger.sweep()
    assert [row[:2] for row in rows(world)] == [(0, ""), (0, "b"), (3, ""), (3, "b")]


async def test_the_last_version_is_measured_by_all(store: Store, worlds: Worlds) -> None:
    evals = {"a": {"every": 1, "tasks": 1}, "b": {"every": 50, "tasks": 1}}
    world = worlds(store, evals=evals, stop={"steps": 100, "eval_reward": 0.9})
    ledger = await world.started()
    await measured(world, ledger, 0.0)
    await measured(world, ledger, 1.0)  # not the main one
    await ledger.sweep()
    assert not ledger.stopping
    await steps(world, ledger, 1)
    await measured(world, ledger, 1.0)
    await ledger.sweep()
    share = await ledger.take(incarnation=1, step=1, rank=0, world=1)
    assert share.stop == "finished"
    await ledger.sweep()
    assert world.hooks.ends == []
    assert [a.eval_set for a in await measured(world, ledger, 0.5)] == ["b"]
    await ledger.sweep()
    await ledger.sweep()
    assert world.hooks.ends == [("succeeded", "the eval reward is reached")]
    await world.clean(ledger)


async def test_several_samples_of_a_task(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval={"tasks": 3, **SAMPLED})
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=100)
    assert [(a.indices, a.pinned_version) for a in leased] == [((0, 1, 2, 3), 0)] * 3
    right, one, none = leased
    await ledger.submit([answered(made, "2") for made in whole(world, [right], 1.0)])
    made = [world.made(one, i, reward=float(i == 1)) for i in range(4)]
    await ledger.submit([answered(*each) for each in zip(made, "7577", strict=True)])
    await ledger.submit([world.made(none, i, reward=0.0) for i in range(4)])
    await ledger.sweep()
    [(_, row)] = world.hooks.of("eval")
    assert row["reward"] == pytest.approx(1.25 / 3)
    assert row["pass@1"] == pytest.approx(1.25 / 3)
    assert row["pass@4"] == pytest.approx(2 / 3)
    assert row["maj@3"] == pytest.approx(1 / 3)
    assert (row["measured"], row["of"], row["dropped"]) == (3, 3, 0)
    last = (await ledger.live()).eval_last
    assert last is not None
    assert last.scores == {name: row[name] for name in ("pass@1", "pass@4", "maj@3")}
    page, _ = await ledger.trajectories.page(purpose="eval", page_size=99, page_token="")
    assert len(page) == 12
    await world.clean(ledger)


async def test_where_the_reward_names_no_answer_the_text_votes(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, eval={"tasks": 2, **SAMPLED})
    ledger = await world.started()
    for leased in await ledger.leases.lease(worker_id="w", train=0, evals=100):
        made = [world.made(leased, i, reward=float(i > 0)) for i in range(4)]
        texts = ("7", "It is  eight.", "it is eight.", "9")
        await ledger.submit(
            [replace(m, response_text=text) for m, text in zip(made, texts, strict=True)]
        )
    await ledger.sweep()
    [(_, row)] = world.hooks.of("eval")
    assert (row["maj@3"], row["text_vote_share"]) == (1.0, 1.0)
    await world.clean(ledger)


async def test_a_task_without_all_its_samples_is_not_measured(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval={"tasks": 4, "timeout_s": 50, **SAMPLED})
    ledger = await world.started()
    *complete, part = await ledger.leases.lease(worker_id="w", train=0, evals=100)
    await ledger.submit(whole(world, complete, 1.0))
    await ledger.submit([world.made(part, i, reward=1.0) for i in range(3)])
    await ledger.sweep()
    assert ledger.evals.held_version() == 0
    world.clock.advance(60)
    await ledger.sweep()
    [(_, row)] = world.hooks.of("eval")
    assert (row["measured"], row["dropped"], row["complete"]) == (3, 1, False)
    assert row["pass@4"] == 1.0
    # Nothing is left of the three samples of the fourth task.
    page, _ = await ledger.trajectories.page(purpose="eval", page_size=99, page_token="")
    assert len(page) == 12
    await world.clean(ledger)


async def test_a_window_counts_samples(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval={"tasks": 4, **SAMPLED})
    world.limits = LimitSettings(eval_window=8)
    ledger = await world.started()
    assert [len(await measured(world, ledger, 1.0)) for _ in range(3)] == [2, 2, 0]
    await ledger.sweep()
    [(_, row)] = world.hooks.of("eval")
    assert (row["measured"], row["reward"], row["pass@4"]) == (4, 1.0, 1.0)
    await world.clean(ledger)


async def test_workers_are_held_no_longer_than_tokens_are_needed(
    store: Store, worlds: Worlds
) -> None:
    """A run ends with its last episode, not with a sweep, and what is due follows at once."""
    world = worlds(store, eval={"every": 1, "tasks": 2}, evals={"b": {"every": 1, "tasks": 1}})
    ledger = await world.started()
    await steps(world, ledger, 1)
    held = list[int]()
    while leased := await ledger.leases.lease(worker_id="w", train=0, evals=100):
        for assignment in leased:
            held.append(ledger.evals.held_version())
            await ledger.submit([world.made(assignment, 0)])
    held.append(ledger.evals.held_version())
    assert held == [0, 0, 0, 1, 1, 1, -1]


async def test_workers_are_not_held_while_episodes_wait_for_their_scores(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, eval={"every": 1, "tasks": 2})
    ledger = await world.started()
    first, second = await ledger.leases.lease(worker_id="w", train=0, evals=100)

    async def told(assignment: Assignment, *, sampled: bool) -> int:
        transcripts = world.made(assignment, 0).transcripts
        key = (assignment.group_id, assignment.indices[0], assignment.attempts[0])
        progress = EpisodeProgress(*key, transcripts, sampled=sampled)
        await ledger.renew(worker_id="w", keys=[], progress=[progress])
        return ledger.evals.held_version()

    assert await told(first, sampled=True) == 0  # the second one needs more tokens
    assert await told(second, sampled=False) == 0
    assert await told(second, sampled=True) == -1
    assert world.hooks.of("eval") == []
    # A score that fails is tried again by another attempt, which may need tokens.
    await ledger.leases.release(worker_id="w")
    assert ledger.evals.held_version() == 0
    for assignment in await ledger.leases.lease(worker_id="w", train=0, evals=100):
        await ledger.submit([world.made(assignment, 0, reward=1.0)])
    await ledger.sweep()
    assert rows(world) == [(0, "", 1.0)]
    await world.clean(ledger)


async def test_an_evaluation_tells_how_its_scores_ended(store: Store, worlds: Worlds) -> None:
    world = worlds(store, evals={"held": {"every": 1, "tasks": 4}})
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=100)
    unread = ScoreStatus.PARSE_ERROR
    ends = [ScoreStatus.OK, unread, unread, ScoreStatus.TIMEOUT]
    made = whole(world, leased, 0.0)
    scored = [
        replace(each, score=replace(each.score, status=end))
        for each, end in zip(made, ends, strict=True)
    ]
    await ledger.submit(scored)
    await ledger.sweep()
    [(_, row)] = world.hooks.of("eval")
    assert (row["parse_error_share"], row["timeout_share"]) == (0.5, 0.25)
