"""Clients that send too much, too slowly, or unfold in memory; most of them without a token."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from grpc import aio

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.v1 import jobs_pb2 as pb
from paceline_gateway.http.server import HttpConnection, WebServer
from paceline_gateway.service import listen
from paceline_harness.patience import PATIENCE_S

TOKEN = "pl_bootstrap_of_these_tests"
MEBI = 1 << 20
HEAD = b"POST /v1/tokens HTTP/1.1\r\nhost: x\r\n"


@dataclass
class Process:
    """A gateway whose upstream is away; its own token opens it."""

    pid: int
    http: int
    grpc: str

    def memory(self) -> int:
        """Most that it has ever held, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.http)

    def channel(self) -> aio.Channel:
        most = [("grpc.max_send_message_length", 64 * MEBI)]
        return aio.insecure_channel(self.grpc, options=most)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("gateway")
    settings = ServiceSettings(
        kind=WorkerKind.GATEWAY,
        worker_id="gateway-0",
        run_dir=folder,
        experience="127.0.0.1:1",
        token=TOKEN,
        insecure=True,
        grace_s=3.0,
        options={"http_port": 0},
    )
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings.model_dump(mode="json") | {"token": TOKEN}))
    process = subprocess.Popen([sys.executable, "-m", "paceline_gateway", str(path)])
    while not (folder / "gateway.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    told = json.loads((folder / "gateway.json").read_text())
    yield Process(process.pid, int(told["http"].rpartition(":")[2]), told["grpc"])
    process.kill()
    process.wait()


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """The first line; empty if the connection has ended."""
    with suppress(ConnectionError):
        return await reader.readline()
    return b""


async def pour(process: Process, head: bytes, piece: bytes, num_bytes: int) -> bytes:
    """Send that much after a beginning, or as much as is taken; the first line of the answer."""
    reader, writer = await process.open()
    with suppress(ConnectionError):
        writer.write(head)
        for _ in range(num_bytes // len(piece)):
            writer.write(piece)
            await writer.drain()
    found = await answer_of(reader)
    writer.close()
    return found


async def test_a_header_of_120_mb_is_not_kept(gateway: Process) -> None:
    before = gateway.memory()
    head = b"x-more: " + b"x" * 1_000 + b"\r\n"
    for start in (HEAD + b"x-long: ", HEAD):
        piece = b"x" * 65_536 if start.endswith(b" ") else head * 64
        found = await pour(gateway, start, piece, 120 * MEBI)
        # Some clients hear only that the connection is closed.
        assert found in (b"", b"HTTP/1.1 400 Bad Request\r\n")
    assert gateway.memory() - before < 16 * MEBI


@pytest.mark.parametrize("length", [b"content-length: 314572800", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("token", ["", TOKEN])
async def test_a_body_of_300_mb_is_not_kept(gateway: Process, length: bytes, token: str) -> None:
    before = gateway.memory()
    head = HEAD + f"authorization: Bearer {token}\r\n".encode() + length + b"\r\n\r\n"
    data = b"x" * 65_536
    chunked = b"chunked" in length
    piece = b"%x\r\n%s\r\n" % (len(data), data) if chunked else data
    reader, writer = await gateway.open()
    writer.write(head)
    if not token or not chunked:
        # Refused for what the header says.
        found = await answer_of(reader)
    else:
        found = b""
    with suppress(ConnectionError):
        for _ in range(300 * MEBI // len(data)):
            writer.write(piece)
            await writer.drain()
    found = found or await answer_of(reader)
    writer.close()
    assert found.startswith(b"HTTP/1.1 422" if token else b"HTTP/1.1 401")
    assert gateway.memory() - before < 16 * MEBI


async def told(channel: aio.Channel, name: str, data: bytes, **more: Any) -> grpc.StatusCode:
    call: Any = channel.unary_unary(f"/paceline.v1.{name}")
    try:
        await call(data, timeout=PATIENCE_S, **more)
    except aio.AioRpcError as refused:
        return refused.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("token", ["", TOKEN])
async def test_a_message_does_not_unfold(gateway: Process, token: str) -> None:
    """47 MB of one letter are 46 KB on their way."""
    before = gateway.memory()
    bomb = pb.CancelJobRequest(job_id="x", reason="x" * (47 * MEBI)).SerializeToString()
    metadata = (("authorization", f"Bearer {token}"),)
    async with gateway.channel() as channel:
        for _ in range(8):
            code = await told(
                channel,
                "Jobs/CancelJob",
                bomb,
                compression=grpc.Compression.Gzip,
                metadata=metadata,
            )
            assert code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)
    assert gateway.memory() - before < 16 * MEBI


async def test_messages_of_strangers_are_not_read(gateway: Process) -> None:
    before = gateway.memory()
    large = b"\x0a\x80\x80\x80\x14" + b"x" * (40 * MEBI)
    async with gateway.channel() as channel:
        codes = await asyncio.gather(
            *(told(channel, "Jobs/SubmitJob", large) for _ in range(4)),
        )
    assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
    assert gateway.memory() - before < 48 * MEBI


class Strict(HttpConnection):
    """As small as tests need it."""

    header_timeout_s = 0.3
    max_connections = 20


@pytest.fixture
async def small() -> AsyncIterator[int]:
    """The port of a server with few connections and little time."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await receive()
        start = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"2")],
        }
        await send(start)
        await send({"type": "http.response.body", "body": b"ok"})

    listener = listen("127.0.0.1", 0)
    web = WebServer(app, None, connection=Strict)
    serving = asyncio.create_task(web.serve([listener]))
    yield listener.getsockname()[1]
    web.should_exit = True
    await serving
    listener.close()


async def test_slow_headers_are_cut_off(small: int) -> None:
    """However often another byte comes; also after a request that has been answered."""
    for first in (b"", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", small)
        writer.write(first + b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ")
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1_000), 0.05)
        writer.close()


async def test_the_longest_waiting_connection_makes_room(small: int) -> None:
    slow = [await asyncio.open_connection("127.0.0.1", small) for _ in range(60)]
    for _, writer in slow:
        writer.write(b"GET / HTTP/1.1\r\n")
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        assert (await http.get(f"http://127.0.0.1:{small}/")).text == "ok"
    for reader, _ in slow:
        assert await answer_of(reader) == b""
    for _, writer in slow:
        writer.close()


async def test_a_request_that_is_answered_slowly_is_not_cut_off(small: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small)
    writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n")
    # Others come and go in the meantime, for longer than a header may take.
    for _ in range(3):
        idle, other = await asyncio.open_connection("127.0.0.1", small)
        assert await answer_of(idle) == b""
        other.close()
    writer.write(b"x")
    assert await answer_of(reader) == b"HTTP/1.1 200 OK\r\n"
    writer.close()
