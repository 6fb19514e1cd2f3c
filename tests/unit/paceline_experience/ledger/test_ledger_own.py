"""A ledger whose filters and advantages came with its job goes on while they think."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config.uploads import CodeSpec
from paceline.enums import StopReason
from paceline.isolation.sandbox import landlock
from paceline.v1 import experience_pb2 as pb
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.ledger.generation.modes import EpisodeKey
from paceline_experience.store.keys import JobKeys
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import sealed_processes

if TYPE_CHECKING:
    from conftest import OwnCode

    from paceline_experience.jobs.own_functions import OwnFunctions
    from paceline_experience.ledger.ledger import BatchShare, JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
PLUGINS = Path(__file__).parents[3] / "plugins"
OWN = """
import time
from paceline.plugins import Advantages, Drop, Keep, Repair


def slow(group, *, seconds: float = 0.0):
    time.sleep(seconds if len(group.answers) and group.answers[0] == "" else 0.0)
    return Keep()


def every_second(group):
    return Keep() if group.task % 2 else Drop("even")


def again(group):
    return Repair([0]) if group.rewards[0] == 0 else Keep()


def raises(group):
    raise RuntimeError(f"a bug at {len(group.rewards)} rewards")


def late(batch, context, *, seconds: float = 0.0):
    time.sleep(seconds)
    return batch.rewards


def bug(batch, context):
    return batch.rewards / (context.step - 1)
"""


@pytest.fixture
def functions(own_code: OwnCode) -> OwnFunctions:
    remembering = (PLUGINS / "paceline_test_remembering.py").read_text()
    return own_code({"own.py": OWN, "remembering.py": remembering})


async def with_own(functions: OwnFunctions, world: World) -> World:
    """The world of a job with code."""
    spec = world.spec.model_copy(update={"code": CodeSpec(digest="0" * 64)})
    return replace(world, spec=spec, own=await functions.of(world.job_id, JobParts(spec)))


def advantages_of(share: BatchShare) -> list[tuple[int, list[float]]]:
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    return [(s.index, list(s.advantages)) for s in samples]


async def memory_of(world: World) -> dict[str, bytes]:
    (found,) = await world.store.hashes(JobKeys("default", world.job_id).memory)
    return {key.decode().partition("/")[2]: text for key, text in found.items()}


async def decided(ledger: JobLedger) -> None:
    """Wait until no group is complete and undecided."""
    async with asyncio.timeout(PATIENCE_S):
        while (await ledger.live()).open_groups:
            await asyncio.sleep(0.01)


async def steps(world: World, last: int) -> list[Any]:
    """The advantages of some steps; experience restarts before and after each batch is fixed."""
    ledger = await world.started()
    found: list[Any] = []
    for step in range(last):
        await world.filled(ledger, version=step)
        ledger.close()
        ledger = await world.opened()
        share = await ledger.take(incarnation=1, step=step, rank=0, world=1)
        found.append(advantages_of(share))
        ledger.close()
        ledger = await world.opened()
        await ledger.commit(incarnation=1, step=step, batch_id=share.batch_id, metrics={"kl": 0.1})
        await ledger.publish_version(incarnation=1, step=step + 1, parent=step, num_bytes=10)
    await world.clean(ledger)
    return found


async def ends(world: World, ledger: JobLedger) -> tuple[str, str]:
    async with asyncio.timeout(PATIENCE_S):
        while not world.hooks.ends:
            await asyncio.sleep(0.01)
            await ledger.sweep()
    return world.hooks.ends[0]


async def test_a_group_is_repaired_as_its_own_filter_says(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    filters = [{"kind": "own:again"}]
    world = worlds(store, experience={"filters": filters, "batch_groups": 1, "max_staleness": 0})
    world = await with_own(functions, world)
    ledger = await world.started()
    await world.filled(ledger)  # rewards 0 and 1
    async with asyncio.timeout(PATIENCE_S):
        while not (again := await ledger.leases.lease(worker_id="w", train=9, evals=0)):
            await asyncio.sleep(0.01)
    assert [each.indices for each in again] == [(2,)]
    await ledger.submit([world.made(again[0], 0, reward=1.0)])
    await decided(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert [index for index, _ in advantages_of(share)] == [1, 2]
    assert (await world.clean(ledger))["repaired"] == 1


async def test_what_is_remembered_is_what_the_installed_function_remembers(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    found: list[tuple[Any, Any]] = []
    for job_id, name in (("j1", "stored_mean"), ("j2", "remembering:stored_mean")):
        experience = {"advantage": name, "filters": [], "max_staleness": 0}
        world = replace(worlds(store, experience=experience), num_tasks=4, job_id=job_id)
        if ":" in name:
            world = await with_own(functions, world)
        found.append((await steps(world, 4), await memory_of(world)))
    assert found[0] == found[1]
    assert len(found[0][1]) == 4


async def test_own_parts_stand_among_installed_ones(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    experience = {
        "filters": ["zero_variance", "own:every_second"],
        "advantage": "remembering:per_token",
        "advantage_shaping": ["doubled"],
    }
    world = await with_own(functions, worlds(store, experience=experience))
    ledger = await world.started()
    waits = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    while not waits.done():
        await asyncio.sleep(0.01)
        await world.filled(ledger)
    assert {value for _, values in advantages_of(await waits) for value in values} == {201.0}
    counts = await world.clean(ledger)
    assert counts["filtered"] > 0


async def test_a_ledger_goes_on_while_its_own_code_thinks(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    """Leases are renewed and granted, and the trainer of a stopped job hears so, meanwhile."""
    experience = {
        "filters": [{"kind": "own:slow", "seconds": 3.0}],
        "advantage": {"kind": "own:late", "seconds": 3600.0},
    }
    world = await with_own(functions, worlds(store, experience=experience))
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    first, *others = leased
    await ledger.submit(world.whole([first]))
    keys = [
        EpisodeKey(each.group_id, index, attempt)
        for each in others
        for index, attempt in zip(each.indices, each.attempts, strict=True)
    ]
    assert await ledger.renew(worker_id="w", keys=keys, progress=[]) == []
    await ledger.sweep()
    assert (await ledger.live()).ready_groups == 0  # the filter still thinks
    await ledger.submit(world.whole(others))
    await decided(ledger)
    takes = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    await asyncio.sleep(0.2)
    await ledger.sweep()
    assert not takes.done()
    await ledger.completion.cancel()
    assert (await asyncio.wait_for(takes, PATIENCE_S)).stop is StopReason.CANCELLED
    ledger.close()


async def test_a_group_that_is_dropped_meanwhile_stays_dropped(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    experience = {"filters": [{"kind": "own:slow", "seconds": 0.5}]}
    world = await with_own(functions, worlds(store, experience=experience))
    ledger = await world.started()
    await world.filled(ledger)
    await ledger.completion.cancel()
    await asyncio.sleep(1.0)
    counts = await world.clean(ledger)
    assert counts["cancelled"] > 0
    assert not (await ledger.live()).ready_groups


async def test_a_process_that_dies_costs_no_group(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    experience = {"filters": [{"kind": "own:slow", "seconds": 0.3}]}
    world = await with_own(functions, worlds(store, experience=experience))
    ledger = await world.started()
    leased = await world.filled(ledger)
    await asyncio.sleep(0.1)
    for each in sealed_processes():
        each.kill()
    await decided(ledger)
    assert (await ledger.live()).ready_groups == len(leased)


@pytest.mark.parametrize(
    ("experience", "reason"),
    [
        (
            {"filters": ["zero_variance", "own:raises"]},
            "experience.filters.1: own:raises: RuntimeError: a bug at 2 rewards (own.py:",
        ),
        ({"advantage": "own:bug"}, ""),
        (
            {"advantage": {"kind": "own:late", "seconds": 60.0}},
            "experience.advantage: own:late: did not answer within 3 s",
        ),
    ],
)
async def test_own_code_that_fails_fails_its_job_by_name(
    store: Store,
    worlds: Worlds,
    own_code: OwnCode,
    experience: dict[str, Any],
    reason: str,
) -> None:
    functions = own_code({"own.py": OWN}, call_s=3.0 if "3 s" in reason else PATIENCE_S)
    world = await with_own(functions, worlds(store, experience=experience))
    ledger = await world.started()
    takes = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    playing = asyncio.create_task(_play(world, ledger))
    if not reason:  # only at the second step
        share = await takes
        await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
        await ledger.publish_version(incarnation=1, step=1, parent=0, num_bytes=10)
        takes = asyncio.create_task(ledger.take(incarnation=1, step=1, rank=0, world=1))
        reason = "experience.advantage: own:bug: ValueError: finite numbers of 32 bits are due"
    state, why = await ends(world, ledger)
    playing.cancel()
    assert (state, why[: len(reason)]) == ("failed", reason)
    assert (await takes).stop
    ledger.close()


async def _play(world: World, ledger: JobLedger) -> None:
    while True:
        await world.filled(ledger, version=(await ledger.live()).version)
        await asyncio.sleep(0.02)


async def test_a_group_with_enough_is_closed_before_its_own_filter_has_answered(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    """What is open is aborted at once, and a restart meanwhile does not open it again."""
    many = {"allocator": {"kind": "redundancy", "extra": 1}, "batch_groups": 1, "group_size": 2}
    slow = {"kind": "own:slow", "seconds": 0.5}
    world = await with_own(functions, worlds(store, experience={**many, "filters": [slow]}))
    ledger = await world.started()
    (leased,) = await ledger.leases.lease(worker_id="w", train=3, evals=0)
    await ledger.submit([world.made(leased, place, reward=float(place)) for place in (2, 0)])
    live = await ledger.live()
    assert (live.open_groups, live.counts["leased"], live.dropped) == (1, 0, {"surplus": 1})
    ledger.close()
    ledger = await world.opened()
    await decided(ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert sorted(index for index, _ in advantages_of(share)) == [0, 2]
    await world.clean(ledger)
