"""Weight streams between processes that verify each other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from paceline.config.service import TlsSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError, UnavailableError
from paceline.platform.transport.rpc_authorization import WEIGHT_PEERS
from paceline.weights import SnapshotHeader, Staging, WeightServer, plan, pull
from paceline_harness.certificates import Authority

CHUNK = 1 << 20
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, name="ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path, name="theirs")


def snapshot(num_bytes: int = 5 * CHUNK + 77) -> Staging:
    entries, total = plan([("a", "uint8", (num_bytes,))])
    staging = Staging(SnapshotHeader("job", 1, 1, 0, -1, 1, total, CHUNK, entries))
    staging.fill(0, os.urandom(total))
    staging.finish()
    return staging


@asynccontextmanager
async def serving(staging: Staging, tls: TlsSettings | None) -> AsyncGenerator[str]:
    server = WeightServer(host="127.0.0.1", tls=tls)
    server.offer(staging)
    endpoint = await server.start()
    try:
        yield endpoint
    finally:
        await server.close()


async def fetch(
    endpoint: str, tls: TlsSettings | None, into: Callable[[SnapshotHeader], Staging] = Staging
) -> Staging:
    return await pull([endpoint], job_id="job", version=1, stage=into, timeout_s=60, tls=tls)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_chain_of_peers_gets_the_same_bytes(
    ours: Authority, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    source = snapshot()

    async def chain() -> Staging:
        relay = WeightServer(host="127.0.0.1", tls=ours.issue("relay"))

        def into(header: SnapshotHeader) -> Staging:
            staging = Staging(header)
            relay.offer(staging)
            return staging

        async with serving(source, ours.issue("trainer")) as first:
            assert first.startswith("https://")
            second = await relay.start()
            middle = asyncio.create_task(fetch(first, ours.issue("middle"), into))
            while not relay.versions():
                await asyncio.sleep(0.01)
            last = await fetch(second, ours.issue("last"))
            await middle
        await relay.close()
        return last

    with asyncio.Runner(loop_factory=loop) as runner:
        last = runner.run(chain())
    assert bytes(last.buffer()) == bytes(source.buffer())
    assert last.root == source.root


@pytest.mark.parametrize("loop", LOOPS)
def test_strangers_are_refused(
    ours: Authority, theirs: Authority, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    stranger = theirs.issue("stranger").model_copy(update={"authority": ours.path})

    async def refused() -> None:
        async with serving(snapshot(), ours.issue("trainer")) as endpoint:
            with pytest.raises(UnavailableError, match=r"(?i)unknown[ _]ca|ended the stream"):
                await fetch(endpoint, stranger)
            with pytest.raises(UnavailableError, match="is not http://host:port"):
                await fetch(endpoint, None)
            with pytest.raises(UnavailableError, match="ended the stream early"):
                await fetch(endpoint.replace("https", "http"), None)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(refused())


async def test_a_server_is_verified(ours: Authority, theirs: Authority) -> None:
    client = ours.issue("client")
    elsewhere: dict[str, Any] = {"domain": "elsewhere", "peer_name": "elsewhere"}
    async with serving(snapshot(), theirs.issue("trainer")) as endpoint:
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await fetch(endpoint, client)
    async with serving(snapshot(), ours.issue("trainer", **elsewhere)) as endpoint:
        with pytest.raises(UnavailableError, match=r"not valid for 'paceline\.internal'"):
            await fetch(endpoint, client)
        client = ours.issue("client", **elsewhere)
        assert (await fetch(endpoint, client)).complete


async def test_a_server_without_tls_is_never_contacted(ours: Authority) -> None:
    async with serving(snapshot(), None) as endpoint:
        with pytest.raises(UnavailableError, match="is not https://host:port"):
            await fetch(endpoint, ours.issue("client"))


async def test_a_silent_caller_does_not_hold_up_others(ours: Authority) -> None:
    async with serving(snapshot(), ours.issue("trainer")) as endpoint:
        port = int(endpoint.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await fetch(endpoint, ours.issue("client"))).complete
        writer.close()


async def test_wrong_files_are_named(ours: Authority) -> None:
    tls = ours.issue("trainer")
    tls.key.write_bytes(b"")
    with pytest.raises(ConfigError, match="are not a PEM certificate and its unencrypted key"):
        await WeightServer(host="127.0.0.1", tls=tls).start()
    with pytest.raises(ConfigError, match="are not a PEM certificate and its unencrypted key"):
        await fetch("https://127.0.0.1:1", tls)


@pytest.mark.parametrize("loop", LOOPS)
def test_only_trainers_and_rollout_workers_exchange_weights(
    ours: Authority, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    def of(kind: WorkerKind) -> TlsSettings:
        return ours.issue(kind, kinds=[kind])

    async def tried() -> None:
        trainer, rollout = of(WorkerKind.TRAINER), of(WorkerKind.ROLLOUT)
        for server, client in ((trainer, rollout), (rollout, rollout), (trainer, trainer)):
            async with serving(snapshot(), server) as endpoint:
                assert (await fetch(endpoint, client)).complete
        async with serving(snapshot(), trainer) as endpoint:
            for kind in set(WorkerKind) - WEIGHT_PEERS:
                with pytest.raises(UnavailableError, match="refuses"):
                    await fetch(endpoint, of(kind))
        async with serving(snapshot(), of(WorkerKind.REWARD)) as endpoint:
            with pytest.raises(UnavailableError, match="not that of a trainer or rollout"):
                await fetch(endpoint, rollout)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(tried())
