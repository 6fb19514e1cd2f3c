"""What the ledger keeps for checkpoints that are older than the newest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.errors import FencedError, StateError
from paceline_experience.jobs.export import Exporter
from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store

if TYPE_CHECKING:
    from paceline_harness.ledgers.world import World, Worlds


async def trained(world: World, ledger: JobLedger, *steps: int) -> list[set[bytes]]:
    """The samples of each step's batch."""
    found: list[set[bytes]] = []
    for step in steps:
        version = (await ledger.live()).version
        await world.filled(ledger, version=version)
        found.append(set((await world.trained(ledger, step)).samples))
    return found


async def payloads(store: Store, world: World) -> int:
    return int(await store.command("HLEN", JobKeys("default", world.job_id).payloads))


async def test_batches_stay_until_no_checkpoint_needs_them(
    store: Store, worlds: Worlds, tmp_path: Path
) -> None:
    world = worlds(store, experience={"keep_trajectories": 1})
    ledger = await world.started()
    batches = await trained(world, ledger, 0, 1, 2, 3, 4)
    await ledger.commit_checkpoint(incarnation=1, step=2, path="p", kept=[0, 2])
    await ledger.commit_checkpoint(incarnation=1, step=4, path="p", kept=[2, 4])
    counts = await world.clean(ledger)
    assert (counts["trained"], counts["durable"]) == (12, 8)
    with pytest.raises(StateError, match="the ledger keeps steps 2 to 5"):
        await ledger.rewind(incarnation=1, step=1)

    ledger = await world.opened()
    number = await ledger.grant_incarnation()
    assert (await ledger.rewind(incarnation=number, step=2))[0] == 2
    for step in (2, 3, 4):
        again = await ledger.take(incarnation=number, step=step, rank=0, world=1)
        assert set(again.samples) == batches[step]
        await ledger.commit(incarnation=number, step=step, batch_id=again.batch_id, metrics={})
    await world.clean(ledger)
    await Exporter(tmp_path).export(ledger, name="step-4")
    before = await payloads(store, world)
    await ledger.commit_checkpoint(incarnation=number, step=4, path="p")
    assert await payloads(store, world) < before
    assert (await world.clean(ledger))["durable"] == 16


async def test_a_full_budget_costs_the_fallback_and_not_the_job(
    store: Store, worlds: Worlds
) -> None:
    little = {"keep_trajectories": 1}
    world = worlds(store, experience=little)
    ledger = await world.started()
    await trained(world, ledger, 0, 1)
    used = (await ledger.live()).payload_bytes
    world.spec = worlds(store, experience={"payload_bytes": used, **little}).spec
    ledger = await world.opened()
    await ledger.commit_checkpoint(incarnation=1, step=2, path="p", kept=[0, 2])
    assert (await ledger.live()).headroom_groups == 0
    await ledger.sweep()
    assert (await ledger.live()).headroom_groups > 0
    with pytest.raises(StateError, match="the ledger keeps steps 2 to 2"):
        await ledger.rewind(incarnation=1, step=0)
    assert (await world.clean(ledger))["durable"] == 8


@pytest.mark.parametrize("cancelled", [True, False])
async def test_nothing_is_kept_for_a_job_that_is_over(
    store: Store, worlds: Worlds, tmp_path: Path, *, cancelled: bool
) -> None:
    world = worlds(store, stop={"steps": 2}, experience={"keep_trajectories": 1})
    ledger = await world.started()
    await trained(world, ledger, 0, 1)
    await ledger.commit_checkpoint(incarnation=1, step=2, path="p", kept=[0, 2])
    assert await payloads(store, world) == 8
    await Exporter(tmp_path).export(ledger, name="step-2")
    if cancelled:
        await ledger.completion.cancel()
    else:
        assert (await ledger.take(incarnation=1, step=2, rank=0, world=1)).stop == "finished"
        await ledger.sweep()
        assert world.hooks.ends == [("succeeded", "all steps are done")]
    assert await payloads(store, world) == 1
    await ledger.commit_checkpoint(incarnation=1, step=2, path="p", kept=[0, 2])
    assert (await world.clean(ledger))["durable"] == 8


async def test_after_a_fallback_the_skipped_checkpoint_is_ignored(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    await trained(world, ledger, 0, 1, 2, 3)
    await ledger.commit_checkpoint(incarnation=1, step=3, path="p", kept=[1, 3])
    number = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=number, step=1)
    await ledger.completion.cancel()
    counts = await world.clean(ledger)
    assert (counts["durable"], counts["trained"]) == (4, 0)


async def test_digests_are_known_of_what_was_committed_and_can_be_loaded(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    await trained(world, ledger, 0, 1, 2, 3)
    assert await ledger.batches.checkpoints(incarnation=1) == {}
    await ledger.commit_checkpoint(incarnation=1, step=2, path="p", kept=[0, 2], digest="two")
    # Step 1 lies in the storage, and nobody has ever committed it.
    await ledger.commit_checkpoint(incarnation=1, step=4, path="p", kept=[1, 2, 4], digest="four")
    assert await ledger.batches.checkpoints(incarnation=1) == {2: "two", 4: "four"}

    ledger = await world.opened()
    number = await ledger.grant_incarnation()
    with pytest.raises(FencedError):
        await ledger.batches.checkpoints(incarnation=1)
    assert await ledger.batches.checkpoints(incarnation=number) == {2: "two", 4: "four"}
    await ledger.rewind(incarnation=number, step=2)
    assert await ledger.batches.checkpoints(incarnation=number) == {2: "two"}
    await ledger.rewind(incarnation=number, step=1)
    assert await ledger.batches.checkpoints(incarnation=number) == {}
