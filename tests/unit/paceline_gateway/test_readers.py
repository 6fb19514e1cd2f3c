"""Clients that do not read their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from paceline.platform.transport.principal import ALL_TENANTS, Principal, Role, token_digest
from paceline_gateway.access.authentication import Authenticator
from paceline_gateway.access.guard import RestGuard
from paceline_gateway.access.rules import Routes
from paceline_gateway.http.server import HttpConnection, WebServer
from paceline_gateway.service import listen
from paceline_harness.patience import PATIENCE_S

LARGE = 32 << 20  # more than all buffers on the way
TOKEN = "pl_bootstrap_of_these_tests"
ROUTES = Routes({"GET /open": None, "GET /large": Role.READ, "GET /small": None})


class Hasty(HttpConnection):
    """With little time."""

    header_timeout_s = 0.3
    send_timeout_s = 0.3


class Patient(HttpConnection):
    """With less time than a slow reader takes in all, and more than a busy machine for a piece."""

    send_timeout_s = 1.5


class Crowded(HttpConnection):
    """With little room."""

    max_connections = 20


class Answers:
    """An application behind a guard, on a port of its own."""

    def __init__(self, connection: type[HttpConnection]) -> None:
        self.open = 0
        who = Principal("t", "ann", ALL_TENANTS, Role.READ)
        nobody: Any = None
        authenticator = Authenticator(
            authentication=nobody, refusals=nobody, own={token_digest(TOKEN): who}
        )
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.web = WebServer(
            RestGuard(self._answer, authenticator=authenticator, routes=ROUTES),
            None,
            connection=connection,
        )
        self._serving = asyncio.create_task(self.web.serve([self._listener]))

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        size = 2 if scope["path"] == "/small" else LARGE
        # What has a rule comes in one piece, the rest as files do.
        pieces = [size] if scope["path"] != "/open" else [1 << 16] * (size >> 16)
        self.open += 1
        try:
            headers = [(b"content-length", b"%d" % size)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for number, length in enumerate(pieces, 1):
                more = number < len(pieces)
                await send({"type": "http.response.body", "body": bytes(length), "more_body": more})
        finally:
            self.open -= 1

    async def ask(self, path: str, *, close: bool = False) -> asyncio.StreamWriter:
        """A request whose answer nobody reads."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
        writer.write((head + "connection: close\r\n" * close + "\r\n").encode())
        await reader.readexactly(1)
        return writer

    async def stop(self) -> None:
        self.web.should_exit = True
        await self._serving
        self._listener.close()


@pytest.fixture
async def answers(connection: type[HttpConnection]) -> AsyncIterator[Answers]:
    made = Answers(connection)
    yield made
    await made.stop()


@pytest.mark.parametrize("connection", [Hasty])
@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("path", ["/open", "/large"])
async def test_a_client_that_reads_nothing_is_disconnected(
    answers: Answers, path: str, close: bool
) -> None:
    writer = await answers.ask(path, close=close)
    assert answers.open == 1  # so long it counts among the calls of its token
    async with asyncio.timeout(PATIENCE_S):
        while answers.open or answers.web.server_state.connections:
            await asyncio.sleep(0.01)
    writer.close()


@pytest.mark.parametrize("connection", [Patient])
@pytest.mark.parametrize("path", ["/open", "/large"])
async def test_a_slow_reader_is_not_disconnected(answers: Answers, path: str) -> None:
    url = f"http://127.0.0.1:{answers.port}{path}"
    headers = {"authorization": f"Bearer {TOKEN}"}
    got, began = 0, asyncio.get_running_loop().time()
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as http,
        http.stream("GET", url, headers=headers) as response,
    ):
        async for piece in response.aiter_bytes(1 << 20):
            got += len(piece)
            await asyncio.sleep(0.11)
    assert got == LARGE
    assert asyncio.get_running_loop().time() - began > 2 * Patient.send_timeout_s


@pytest.mark.parametrize("connection", [Crowded])
async def test_a_client_that_does_not_read_makes_room(
    answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    writers: list[asyncio.StreamWriter] = []
    for _ in range(30):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            writers.append(await answers.ask("/open"))
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        assert (await http.get(f"http://127.0.0.1:{answers.port}/small")).content == bytes(2)
    assert len(writers) == 30
    assert caplog.messages.count("too many connections") == 1  # once for all of them
    for writer in writers:
        writer.close()
