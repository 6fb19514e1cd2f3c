"""A job of kind `eval`: one version, every episode once, and no training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import JobSpec
from paceline.config.evaluation import EvalSpec
from paceline.config.limits import LimitSettings
from paceline.errors import StateError
from paceline.types import Reply, Transcript, WeightRefusal
from paceline_experience.ledger.evaluation.scores import MAX_MODELS, added
from paceline_experience.ledger.records import EpisodeSummary, EvalTotals

if TYPE_CHECKING:
    from paceline.types import Assignment, Trajectory
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

SETS: dict[str, Any] = {
    "a": {"tasks": 3, "samples": 2, "temperature": 1.0, "pass_at": [1, 2]},
    "b": {"tasks": 2},
}


def whole(world: World, leased: list[Assignment], reward: float = 1.0) -> list[Trajectory]:
    return [world.made(a, place, reward=reward) for a in leased for place in range(len(a.indices))]


async def served_again(ledger: JobLedger, digest: str) -> int:
    """The number under which the next start of what serves the weights publishes them."""
    number = await ledger.grant_incarnation()
    told: dict[str, Any] = {"incarnation": number, "step": 0, "parent": -1, "num_bytes": 10}
    published = await ledger.publish_version(**told)
    confirmed = await ledger.publish_version(**told, digest=digest, number=published.version)
    assert confirmed.incarnation == number
    return published.version


async def test_it_measures_each_task_once_and_ends(store: Store, worlds: Worlds) -> None:
    world = worlds(store, kind="eval", evals=SETS, stop={"steps": 1})
    world.limits = LimitSettings(eval_window=4)
    ledger = await world.started()
    seen: list[tuple[str, int]] = []
    while leased := await ledger.leases.lease(worker_id="w", train=100, evals=3):
        assert {a.purpose for a in leased} == {"eval"}
        seen += [(a.group_id, index) for a in leased for index in a.indices]
        await ledger.submit(whole(world, leased))
        await ledger.sweep()
    assert len(seen) == len({*seen}) == 3 * 2 + 2
    # Nobody has to tell a trainer, and the result of both sets is there.
    assert world.hooks.ends == [("succeeded", "all tasks are measured")]
    assert [row["set"] for _, row in world.hooks.of("eval")] == ["a", "b"]
    page, _ = await ledger.trajectories.page(purpose="eval", page_size=99, page_token="")
    assert {(each.group_id, each.index) for each in page} == {*seen}
    counts = await world.clean(ledger)
    assert counts["admitted"] == 0


async def test_a_restart_of_what_serves_the_weights_changes_nothing(
    store: Store, worlds: Worlds
) -> None:
    """Otherwise episodes that are pinned to the first version would wait for ever."""
    world = worlds(store, kind="eval", eval={"tasks": 2})
    ledger = await world.started()
    told: dict[str, Any] = {"incarnation": 1, "step": 0, "parent": -1, "num_bytes": 10}
    await ledger.publish_version(**told, digest="d1", number=0)
    (first,) = await ledger.leases.lease(worker_id="w", train=0, evals=1)
    assert await served_again(ledger, "d1") == 0
    ledger = await world.opened()
    assert await served_again(ledger, "d1") == 0
    (second,) = await ledger.leases.lease(worker_id="w", train=0, evals=9)
    assert (first.pinned_version, second.pinned_version) == (0, 0)
    await ledger.submit(whole(world, [first, second]))
    await ledger.sweep()
    assert world.hooks.ends == [("succeeded", "all tasks are measured")]
    assert len(world.hooks.of("eval")) == 1
    with pytest.raises(StateError, match="version 0 has other weights: its digest is d1"):
        await served_again(ledger, "d2")


async def test_a_pause_loses_nothing_and_repeats_nothing(store: Store, worlds: Worlds) -> None:
    world = worlds(store, kind="eval", eval={"tasks": 3})
    ledger = await world.started()
    (done,) = await ledger.leases.lease(worker_id="w", train=0, evals=1)
    (begun,) = await ledger.leases.lease(worker_id="w", train=0, evals=1)
    await ledger.submit(whole(world, [done]))
    await ledger.pauses.begin()
    assert await ledger.leases.lease(worker_id="w", train=0, evals=9) == []
    await ledger.pauses.hold()
    assert await served_again(ledger, "d") == 0
    left = await ledger.leases.lease(worker_id="w", train=0, evals=9)
    assert {a.group_id for a in left} >= {begun.group_id}
    assert done.group_id not in {a.group_id for a in left}
    await ledger.submit(whole(world, left))
    await ledger.sweep()
    [(_, row)] = world.hooks.of("eval")
    assert (row["measured"], row["dropped"]) == (3, 0)
    await world.clean(ledger)


async def test_it_fails_if_nothing_could_be_measured(store: Store, worlds: Worlds) -> None:
    world = worlds(store, kind="eval", eval={"tasks": 2, "timeout_s": 50})
    ledger = await world.started()
    await ledger.leases.lease(worker_id="w", train=0, evals=9)
    await ledger.sweep()
    world.clock.advance(60)
    await ledger.sweep()
    [(state, reason)] = world.hooks.ends
    assert (state, reason[:37]) == ("failed", "eval: no task could be measured (`tas")


async def test_a_set_without_tasks_is_no_success(store: Store, worlds: Worlds) -> None:
    world = worlds(store, kind="eval", evals={"hard": {"tasks": 2}})
    world.num_eval_tasks = 0
    ledger = await world.started()
    await ledger.sweep()
    [(state, reason)] = world.hooks.ends
    assert (state, reason[:33]) == ("failed", "hard: no task could be measured (")


async def test_it_fails_at_once_if_all_engines_refuse_its_weights(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, kind="eval", eval={"tasks": 2})
    ledger = await world.started()
    await ledger.versions.hear(serving=[], refusals=[WeightRefusal(0, "another canary")])
    await ledger.sweep()
    [(state, reason)] = world.hooks.ends
    assert state == "failed"
    assert reason.startswith("another canary; all rollout workers refuse version 0")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"eval": None}, "a job of kind eval needs it"),
        ({"eval": {"tasks": 40_000}, "evals": {"b": {"tasks": 40_000}}}, "at most 65536"),
        ({"kind": "measure"}, "'train' or 'eval'"),
    ],
)
def test_what_such_a_job_may_be(fields: dict[str, Any], told: str) -> None:
    job = {
        "name": "j",
        "kind": "eval",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": [{"kind": "exact"}],
    }
    with pytest.raises(ValueError, match=told):
        JobSpec.model_validate(job | fields)


OUTSIDE = {"path": "small", "endpoint": {"name": "outside"}}


def answered(world: World, assignment: Assignment, *, model: str, tokens: int) -> Trajectory:
    reply = Reply("7", model, "stop", 5, tokens)
    made = world.made(assignment, 0, reward=1.0)
    messages = '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "7"}]'
    dialogue = Transcript((), (), (), (), messages=messages, replies=(reply,))
    return replace(made, transcripts=(dialogue,))


async def test_an_outside_endpoint_is_measured_without_a_publication(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, kind="eval", eval={"tasks": 3}, model=OUTSIDE)
    ledger = await world.opened()
    assert await ledger.leases.lease(worker_id="w", train=0, evals=9) == []
    await ledger.begin()
    await ledger.begin()  # as after a crash between this and the job's record
    leased = [(await ledger.leases.lease(worker_id="w", train=0, evals=1))[0] for _ in range(2)]
    ledger = await world.opened()
    await ledger.begin()
    leased += await ledger.leases.lease(worker_id="w", train=0, evals=9)
    assert len({each.group_id for each in leased}) == 3
    names = ("served-1", "served-1", "served-2")
    found = [
        answered(world, each, model=name, tokens=2)
        for each, name in zip(leased, names, strict=True)
    ]
    found[2] = answered(world, leased[2], model="served-2", tokens=-1)  # it has not said
    await ledger.submit(found)
    await ledger.sweep()
    assert world.hooks.ends == [("succeeded", "all tasks are measured")]
    [(_, row)] = world.hooks.of("eval")
    assert row["models"] == {"served-1": 2, "served-2": 1}
    assert (row["endpoint"], row["tokens"], row["reward"]) == ("outside", 4, 1.0)
    assert not {"version", "weights"} & set(row)
    await world.clean(ledger)


async def test_a_pause_of_an_outside_endpoint_goes_on(store: Store, worlds: Worlds) -> None:
    world = worlds(store, kind="eval", eval={"tasks": 2}, model=OUTSIDE)
    ledger = await world.opened()
    await ledger.begin()
    await ledger.leases.lease(worker_id="w", train=0, evals=1)
    await ledger.pauses.begin()
    await ledger.pauses.hold()
    assert await ledger.leases.lease(worker_id="w", train=0, evals=9) == []
    await ledger.begin()
    left = await ledger.leases.lease(worker_id="w", train=0, evals=9)
    assert len(left) == 2
    await world.clean(ledger)


def test_models_are_counted_by_name_up_to_a_bound() -> None:
    spec = EvalSpec(tasks=100)
    tasks = [
        [EpisodeSummary(1, 1.0, False, 1, 1, -1, 1, model=f"m{number % 40}")]
        for number in range(100)
    ]
    found = added(EvalTotals(), tasks, spec).models
    assert len(found) == MAX_MODELS + 1
    assert found["m0"] == 3
    assert sum(found.values()) == 100
