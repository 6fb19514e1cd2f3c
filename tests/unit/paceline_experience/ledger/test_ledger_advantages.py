"""Advantages are estimated once, kept with their batch, and may remember across steps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.types import StepMark, TokenSpan, VersionRun
from paceline.v1 import experience_pb2 as pb
from paceline_experience.store.keys import JobKeys

if TYPE_CHECKING:
    from paceline.types import Trajectory
    from paceline_experience.ledger.ledger import BatchShare, JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

TOKENS = 3
REMEMBERING: dict[str, Any] = {"advantage": "stored_mean", "filters": [], "max_staleness": 0}


def advantages_of(share: BatchShare) -> dict[tuple[str, int], list[float]]:
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    return {(s.group_id, s.index): list(s.advantages) for s in samples}


async def memory_of(world: World) -> dict[bytes, bytes]:
    (found,) = await world.store.hashes(JobKeys("default", world.job_id).memory)
    return found


async def steps(world: World, ledger: JobLedger, first: int, last: int) -> list[Any]:
    found: list[Any] = []
    for step in range(first, last):
        await world.filled(ledger, version=step)
        found.append(advantages_of(await world.trained(ledger, step)))
    return found


def two_epochs(worlds: Worlds, store: Store, job_id: str) -> World:
    """Four tasks, two of which make a batch, so each is seen in every second step."""
    world = worlds(store, experience=REMEMBERING)
    return replace(world, num_tasks=4, job_id=job_id)


async def test_what_a_task_got_before_is_remembered(store: Store, worlds: Worlds) -> None:
    world = two_epochs(worlds, store, "j1")
    ledger = await world.started()
    found = await steps(world, ledger, 0, 4)
    assert [sorted(v for each in step.values() for v in each) for step in found] == [
        [0.0, 0.0, 1.0, 1.0],
        [0.0, 0.0, 1.0, 1.0],
        [-0.5, -0.5, 0.5, 0.5],
        [-0.5, -0.5, 0.5, 0.5],
    ]
    assert len(await memory_of(world)) == 4
    rows = await store.command("LRANGE", JobKeys("default", "j1").metrics, 0, -1)
    assert [json.loads(row)["values"]["tasks_seen"] for row in rows] == [2.0, 4.0, 4.0, 4.0]
    await world.clean(ledger)


async def test_kills_change_neither_advantages_nor_memory(store: Store, worlds: Worlds) -> None:
    """The experience service dies after every operation and the trainer goes back to its start."""
    quiet = two_epochs(worlds, store, "quiet")
    expected = await steps(quiet, await quiet.started(), 0, 6)
    noisy = two_epochs(worlds, store, "noisy")
    ledger = await noisy.started()
    found: list[Any] = []
    for step in range(6):
        await noisy.filled(ledger, version=step)
        ledger = await noisy.opened()
        share = await ledger.take(incarnation=step + 1, step=step, rank=0, world=1)
        ledger = await noisy.opened()
        again = await ledger.take(incarnation=step + 1, step=step, rank=0, world=1)
        assert again.samples == share.samples
        found.append(advantages_of(again))
        await ledger.commit(
            incarnation=step + 1, step=step, batch_id=share.batch_id, metrics={"kl": 0.1}
        )
        ledger = await noisy.opened()
        incarnation = await ledger.grant_incarnation()
        await ledger.rewind(incarnation=incarnation, step=0)
        for back in range(step + 1):
            share = await ledger.take(incarnation=incarnation, step=back, rank=0, world=1)
            assert advantages_of(share) == found[back]
            await ledger.commit(
                incarnation=incarnation, step=back, batch_id=share.batch_id, metrics={}
            )
        await ledger.publish_version(
            incarnation=incarnation, step=step + 1, parent=step, num_bytes=10
        )
    assert [list(each.values()) for each in found] == [list(each.values()) for each in expected]
    assert await memory_of(noisy) == await memory_of(quiet)
    await noisy.clean(ledger)


def with_two_turns(trajectory: Trajectory) -> Trajectory:
    (transcript,) = trajectory.transcripts
    prompt, answer = transcript.spans
    spans = (
        prompt,
        TokenSpan(2, 4, answer.source),
        TokenSpan(4, 6, prompt.source),
        TokenSpan(6, 7, answer.source),
    )
    turns = (StepMark(2, 6, reward=0.5), StepMark(6, 7))
    changed = replace(
        transcript,
        tokens=tuple(range(7)),
        spans=spans,
        logprobs=(-0.5, -0.25, -2.0),
        versions=(VersionRun(0, 3),),
        steps=turns,
    )
    return replace(trajectory, transcripts=(changed,))


async def test_tokens_have_values_of_their_own_and_weightless_episodes_are_masked(
    store: Store, worlds: Worlds
) -> None:
    shaped = {"advantage": "per_token", "advantage_shaping": ["doubled"]}
    world = worlds(store, experience=shaped)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    await ledger.submit([with_two_turns(each) for each in world.whole(leased)])
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    for sample in samples:
        assert sample.masked == (sample.reward == 0.0)
        assert list(sample.advantages) == [201.0, 200.5, 404.0]
    assert share.total_tokens == TOKENS * sum(not each.masked for each in samples)
    await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
    (row,) = await store.command("LRANGE", JobKeys("default", "j1").metrics, 0, -1)
    assert json.loads(row)["values"]["seed"] == world.spec.tasks.seed == 7


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 5000}, "ValueError: memory 'useless' has 5002 bytes; at most 4096 are allowed"),
        ({"size": 1, "key": "k" * 300}, "ValueError: a key of the memory has 1 to 256 bytes"),
    ],
)
async def test_a_memory_is_bounded(
    store: Store, worlds: Worlds, options: dict[str, Any], says: str
) -> None:
    world = worlds(store, experience={"advantage": {"kind": "stored_mean", **options}})
    ledger = await world.started()
    await world.filled(ledger)
    waits = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    while not world.hooks.ends:
        await asyncio.sleep(0.01)
        await ledger.sweep()
    ((state, reason),) = world.hooks.ends
    assert state == "failed"
    assert reason.startswith(f"experience.advantage: stored_mean: {says}")
    await waits
    assert not await memory_of(world)


async def test_a_group_that_comes_again_is_observed_once(store: Store, worlds: Worlds) -> None:
    """The trainer dies while a batch is being filled; what was accepted for it is too old then."""
    world = two_epochs(worlds, store, "j1")
    ledger = await world.started()
    await steps(world, ledger, 0, 1)
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    await ledger.submit(world.whole(leased[:1], version=1))
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=0)
    share = await ledger.take(incarnation=incarnation, step=0, rank=0, world=1)
    await ledger.commit(incarnation=incarnation, step=0, batch_id=share.batch_id, metrics={})
    await ledger.publish_version(incarnation=incarnation, step=1, parent=1, num_bytes=10)
    await ledger.submit(world.whole(leased[1:], version=1))
    waits = asyncio.create_task(ledger.take(incarnation=incarnation, step=1, rank=0, world=1))
    while not waits.done():
        await asyncio.sleep(0.001)
        await world.filled(ledger, version=2)
    counts = [json.loads(text)[1] for text in (await memory_of(world)).values()]
    assert counts == [2] * 4
