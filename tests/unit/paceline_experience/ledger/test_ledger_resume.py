"""A synchronous job that is killed and resumed trains the batches of an undisturbed one.

Rewards and lengths are functions of draw, index and the step of the weights, so whatever is made
from other weights, observed twice or replayed from another pool changes what follows.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.platform.digest import number
from paceline.v1 import experience_pb2 as pb
from paceline_experience.store.keys import JobKeys

if TYPE_CHECKING:
    from paceline.types import Assignment, Trajectory
    from paceline_experience.ledger.ledger import BatchShare, JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

STEPS = 22
EVERY = 10  # steps between kills
BACK = 3  # steps that a resumed trainer goes back
SYNCHRONOUS: dict[str, Any] = {
    "batch_groups": 4,
    "group_size": 4,
    "max_staleness": 0,
    "max_attempts": 16,
    "filters": [{"kind": "zero_variance"}],
}
LEARNING = {**SYNCHRONOUS, "sampler": {"kind": "weakest", "width": 3}}
JOBS: dict[str, dict[str, Any]] = {
    "sampler": LEARNING,
    "experience-replay": {**LEARNING, "replay": {"kind": "experience_replay", "per_task": 3}},
    "dart-pool": {**LEARNING, "replay": {"kind": "dart_pool", "per_task": 2}},
    "small-pool": {**LEARNING, "replay": {"kind": "dart_pool", "pool_bytes": 5000}},
    "any-replay": {**LEARNING, "replay": {"kind": "any_replay", "seed": 4, "per_task": 3}},
}


@dataclass(slots=True)
class Player:
    """Finishes episodes one by one, in an order of its own."""

    world: World
    chance: random.Random

    def made(self, one: Assignment, place: int, *, version: int, step: int) -> Trajectory:
        drawn = number(one.task.seed, one.group_id.split(".")[1], one.indices[place], step)
        found = self.world.made(
            one,
            place,
            reward=float(drawn % 7 < 1),
            version=version,
            tokens=1 + drawn // 7 % 5,
        )
        (transcript,) = found.transcripts
        mark = -0.001 * (drawn % 1000)  # tells which weights have sampled it
        (run,) = transcript.versions
        marked = replace(transcript, logprobs=(mark,) * run.count)
        return replace(found, transcripts=(marked,))

    async def play(self, ledger: JobLedger, *, most: int = 1000) -> None:
        """Finish up to so many episodes with the newest weights, in any order."""
        live = await ledger.live()
        leased = await ledger.leases.lease(worker_id="w", train=100, evals=0)
        every = [
            self.made(one, place, version=live.version, step=live.step)
            for one in leased
            for place in range(len(one.indices))
        ]
        self.chance.shuffle(every)
        while most and every:
            count = min(self.chance.randint(1, 9), most)
            await ledger.submit(every[:count])
            every, most = every[count:], most - count


def contents(share: BatchShare) -> list[tuple[Any, ...]]:
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    return [
        (s.group_id.split(".")[1], s.index, s.reward, *s.tokens, *s.logprobs, *s.advantages)
        for s in samples
    ]


async def batch_of(
    player: Player, ledger: JobLedger, *, incarnation: int, step: int
) -> tuple[BatchShare, list[tuple[Any, ...]]]:
    call = ledger.take(incarnation=incarnation, step=step, rank=0, world=1)
    waits = asyncio.create_task(call)
    while not waits.done():
        await player.play(ledger)
        await asyncio.sleep(0.001)
    share = await waits
    return share, contents(share)


async def publish(ledger: JobLedger, *, incarnation: int, step: int) -> None:
    await ledger.publish_version(incarnation=incarnation, step=step, parent=-1, num_bytes=1)


async def undisturbed(player: Player) -> list[Any]:
    ledger = await player.world.started()
    found: list[Any] = []
    for step in range(STEPS):
        share, told = await batch_of(player, ledger, incarnation=1, step=step)
        found.append(told)
        await ledger.commit(incarnation=1, step=step, batch_id=share.batch_id, metrics={})
        await publish(ledger, incarnation=1, step=step + 1)
    await player.world.clean(ledger)
    return found


async def killed(player: Player) -> list[Any]:
    """At every tenth step experience dies amid its episodes, and the trainer goes back.

    What was open is played on, with the weights of an earlier step.
    """
    world = player.world
    ledger, incarnation, step = await world.started(), 1, 0
    found: dict[int, Any] = {}
    undone: set[int] = set()
    while step < STEPS:
        if step % EVERY == EVERY - 1 and step not in undone:
            undone.add(step)
            await player.play(ledger, most=player.chance.randint(1, 15))
            await ledger.leases.release(worker_id="w")
            ledger = await world.opened()
            incarnation = await ledger.grant_incarnation()
            step, _ = await ledger.rewind(incarnation=incarnation, step=step - BACK)
            await publish(ledger, incarnation=incarnation, step=step)
        share, told = await batch_of(player, ledger, incarnation=incarnation, step=step)
        assert found.setdefault(step, told) == told
        ledger = await world.opened()
        await ledger.commit(incarnation=incarnation, step=step, batch_id=share.batch_id, metrics={})
        step += 1
        await publish(ledger, incarnation=incarnation, step=step)
        await world.clean(ledger)
    return [found[step] for step in range(STEPS)]


async def memory_of(world: World) -> dict[str, Any]:
    (found,) = await world.store.hashes(JobKeys("default", world.job_id).memory)
    return {key.decode().partition("/")[2]: json.loads(text) for key, text in found.items()}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", JOBS)
async def test_killed_at_every_tenth_step_it_trains_the_same_batches(
    kind: str, seed: int, store: Store, worlds: Worlds
) -> None:
    """Few tasks, so that the same one comes several times in a batch, and its guests too."""
    quiet, noisy = (
        replace(worlds(store, experience=JOBS[kind], num_tasks=5), job_id=name)
        for name in ("quiet", "noisy")
    )
    expected = await undisturbed(Player(quiet, random.Random(0)))
    assert await killed(Player(noisy, random.Random(1 + seed))) == expected
    assert await memory_of(noisy) == await memory_of(quiet)
