"""Samplers and allocators that came with a job draw and start what installed ones do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config.uploads import CodeSpec
from paceline.isolation.sandbox import landlock
from paceline.v1 import experience_pb2 as pb
from paceline_experience.jobs.job_parts import JobParts
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import sealed_processes

if TYPE_CHECKING:
    from conftest import OwnCode

    from paceline.types import Assignment, Trajectory
    from paceline_experience.jobs.own_functions import OwnFunctions
    from paceline_experience.ledger.ledger import BatchShare, JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
PLUGINS = Path(__file__).parents[3] / "plugins"
SEED = """
import hashlib


def stable_seed(*parts):
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
"""
SYNCHRONOUS: dict[str, Any] = {"max_staleness": 0, "group_size": 4, "batch_groups": 4}


@pytest.fixture
def functions(own_code: OwnCode) -> OwnFunctions:
    """The plug-ins that these tests have installed, as code of a job."""
    text = (PLUGINS / "paceline_test_learning.py").read_text()
    imported = "from paceline_experience.ledger.task_cursor import stable_seed\n"
    assert imported in text
    return own_code({"learning.py": text.replace(imported, SEED)})


async def with_own(functions: OwnFunctions, world: World) -> World:
    """The world of a job with code."""
    spec = world.spec.model_copy(update={"code": CodeSpec(digest="0" * 64)})
    return replace(world, spec=spec, own=await functions.of(world.job_id, JobParts(spec)))


def played(world: World, leased: list[Assignment]) -> list[Trajectory]:
    """Task t solves t % 4 of the episodes of a group."""
    version = max(0, *(a.min_version for a in leased))
    return [
        world.made(a, place, reward=float(index % 4 < a.task.seed % 4), version=version)
        for a in leased
        for place, index in enumerate(a.indices)
    ]


def contents(share: BatchShare) -> list[tuple[str, int, float]]:
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    return [(s.group_id.partition(".")[2], s.index, s.reward) for s in samples]


class Life:
    """A job that is played, and whose experience service dies whenever it is told to."""

    def __init__(self, world: World, *, kills: bool) -> None:
        self.world, self.kills = world, kills
        self.turn = 0
        self.started = set[tuple[str, int, str, str]]()
        """Groups, indices, tasks and starts of what was leased."""

    async def restarted(self, ledger: JobLedger) -> JobLedger:
        """After every third lease what runs is killed, and the ledger opened from the store."""
        self.turn += 1
        if not self.kills or self.turn % 3:
            return ledger
        for each in sealed_processes():
            each.kill()
        ledger.close()
        return await self.world.opened()

    async def batch(self, ledger: JobLedger, step: int) -> tuple[JobLedger, Any]:
        async with asyncio.timeout(PATIENCE_S):
            takes = asyncio.create_task(ledger.take(incarnation=1, step=step, rank=0, world=1))
            while not takes.done():
                leased = await ledger.leases.lease(worker_id="w", train=6, evals=0)
                self.note(leased)
                if leased:
                    await ledger.submit(played(self.world, leased))
                    after = await self.restarted(ledger)
                    if after is not ledger:
                        takes.cancel()
                        takes = asyncio.create_task(
                            after.take(incarnation=1, step=step, rank=0, world=1)
                        )
                    ledger = after
                await ledger.sweep()
                assert not self.world.hooks.ends
                await asyncio.sleep(0.002)
        share = await takes
        await ledger.commit(incarnation=1, step=step, batch_id=share.batch_id, metrics={})
        await ledger.publish_version(incarnation=1, step=step + 1, parent=step, num_bytes=1)
        return ledger, contents(share)

    def note(self, leased: list[Assignment]) -> None:
        for each in leased:
            name = each.group_id.partition(".")[2]
            told = [(s.variant, s.meta, s.max_tokens, s.parent) for s in each.starts]
            for place, index in enumerate(each.indices):
                start = repr(told[place]) if told else ""
                self.started.add((name, index, each.task.task_id, start))

    async def lived(self, steps: int) -> tuple[list[Any], set[Any]]:
        """The batches, and what was leased."""
        ledger = await self.world.started()
        found: list[Any] = []
        for step in range(steps):
            ledger, batch = await self.batch(ledger, step)
            found.append(batch)
        await self.world.clean(ledger)
        ledger.close()
        return found, self.started


@pytest.mark.parametrize(
    ("sampler", "allocator"),
    [
        ({"kind": "Weakest", "width": 6}, None),
        (None, {"kind": "Depth", "width": 3}),
        ({"kind": "Weakest", "width": 6}, {"kind": "Depth", "width": 3}),
    ],
)
async def test_an_own_one_does_what_the_installed_one_does_across_kills(
    store: Store,
    worlds: Worlds,
    functions: OwnFunctions,
    sampler: dict[str, Any] | None,
    allocator: dict[str, Any] | None,
) -> None:
    """The same batches of the same tasks, wherever they run and whenever they die."""
    found: list[Any] = []
    for job_id, own, kills in (("j1", False, False), ("j2", True, False), ("j3", True, True)):
        experience = {**SYNCHRONOUS, "filters": ["zero_variance"]}
        for field, plugin in (("sampler", sampler), ("allocator", allocator)):
            if plugin is not None:
                name = plugin["kind"]
                named = f"learning:{name}" if own else INSTALLED[name]
                experience[field] = {**plugin, "kind": named}
        world = replace(worlds(store, experience=experience), num_tasks=12, job_id=job_id)
        if own:
            world = await with_own(functions, world)
        found.append(await Life(world, kills=kills).lived(4))
    assert found[0] == found[1]
    assert found[0] == found[2]


INSTALLED = {"Weakest": "weakest", "Depth": "depth"}
