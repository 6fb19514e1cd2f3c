"""Requests that two parsers could end at different places are refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.weights import WeightServer
from paceline_gateway.http.framing import StrictConnection
from paceline_gateway.http.server import WebServer
from paceline_gateway.service import listen
from paceline_harness.patience import PATIENCE_S

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKS = b"0\r\n\r\n"


def post(*headers: bytes, body: bytes = b"", line: bytes = b"POST /seen HTTP/1.1") -> bytes:
    return b"\r\n".join((line, b"host: x", *headers, b"", body))


AMBIGUOUS = {
    "both": post(b"content-length: 5", b"transfer-encoding: chunked", body=CHUNKS),
    "both, turned": post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=CHUNKS),
    "both, none": post(b"content-length: 0", b"transfer-encoding: chunked", body=CHUNKS),
    "same lengths": post(b"content-length: 2", b"content-length: 2", body=b"ok"),
    "two lengths": post(b"content-length: 2", b"content-length: 3", body=b"ok"),
    "list of lengths": post(b"content-length: 2, 2", body=b"ok"),
    "signed length": post(b"content-length: +2", body=b"ok"),
    "two encodings": post(
        b"transfer-encoding: chunked", b"transfer-encoding: chunked", body=CHUNKS
    ),
    "unknown encoding": post(b"transfer-encoding: xchunked", body=CHUNKS),
    "list of encodings": post(b"transfer-encoding: identity, chunked", body=CHUNKS),
    "space before the colon": post(b"transfer-encoding : chunked", body=CHUNKS),
    "folded": post(b"x-a: b\r\n transfer-encoding: chunked", body=CHUNKS),
    "folded by a tab": post(b"x-a: b\r\n\tc"),
    "LF alone": post(b"x-a: b\ntransfer-encoding: chunked", body=CHUNKS),
    "LF alone at the end": b"GET /seen HTTP/1.1\nhost: x\n\n",
    "CR alone": post(b"x-a: b\rtransfer-encoding: chunked", body=CHUNKS),
    "NUL": post(b"x-a: b\0c"),
    "chunked in 1.0": post(b"transfer-encoding: chunked", body=CHUNKS, line=b"POST /seen HTTP/1.0"),
    "two hosts": post(b"host: y"),
    "a header without end": post(b"x-a: " + b"b" * 20_000),
}
PLAIN = {
    "length": post(b"content-length: 2", body=b"ok"),
    "chunked": post(b"transfer-encoding: chunked", body=b"2\r\nok\r\n0\r\n\r\n"),
    "none": b"GET /seen HTTP/1.1\r\nhost: x\r\n\r\n",
}


class Server:
    """A server on loopback, and the paths that it was asked for."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.paths: list[str] = []

    async def answers(self, *pieces: bytes) -> bytes:
        """All that it answers until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        data = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                data = await reader.read()
        writer.close()
        return data


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    listener = listen("127.0.0.1", 0)
    made = Server(listener.getsockname()[1])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        made.paths.append(scope["path"])
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    web = WebServer(app, None)
    serving = asyncio.create_task(web.serve([listener]))
    yield made
    web.should_exit = True
    await serving
    listener.close()


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_ambiguous_requests_are_refused(server: Server, name: str) -> None:
    found = await server.answers(AMBIGUOUS[name], HIDDEN)
    # A client that is still sending may see only that the connection is closed.
    assert not found or found.startswith(b"HTTP/1.1 400"), found
    assert found.count(b"HTTP/1.1") <= 1, found
    assert server.paths == []


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_also_after_a_plain_one(server: Server, name: str) -> None:
    found = await server.answers(PLAIN["length"] + AMBIGUOUS[name] + HIDDEN)
    assert found.count(b"HTTP/1.1 200") == 1, found
    assert server.paths == ["/seen"]


@pytest.mark.parametrize("name", PLAIN)
async def test_plain_requests_share_a_connection(server: Server, name: str) -> None:
    last = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    found = await server.answers(PLAIN[name] * 3 + last)
    assert found.count(b"HTTP/1.1 200") == 4, found
    assert server.paths == ["/seen"] * 3 + ["/last"]


async def test_an_error_after_the_answer_closes_the_connection(server: Server) -> None:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    head = post(b"transfer-encoding: chunked")
    found = await server.answers(head, b"no chunk\r\n" + HIDDEN)
    assert found.count(b"HTTP/1.1") <= 1, found
    assert (server.paths, faults) == (["/seen"], [])


@given(st.integers(0, 120), st.integers(1, 40))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_pieces_in_which_a_request_arrives_do_not_matter(at: int, size: int) -> None:

    for data, is_plain in ((AMBIGUOUS["both"], False), (PLAIN["length"], True)):
        connection = StrictConnection(max_head_bytes=1000)
        pieces = [data[:at], *(data[i : i + size] for i in range(at, len(data), size))]
        events: list[Any] = []
        try:
            for piece in filter(None, pieces):
                connection.receive_data(piece)
                while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                    events.append(type(event))
        except h11.RemoteProtocolError:
            events.append(None)
        assert (events[0] is h11.Request) is is_plain, (events, pieces)


# aiohttp accepts the list, which ends in `chunked` and so leaves no doubt about the end.
@pytest.mark.parametrize("name", sorted(AMBIGUOUS.keys() - {"list of encodings"}))
async def test_so_does_the_port_of_weights(name: str) -> None:
    weights = WeightServer(host="127.0.0.1")
    address = await weights.start()
    server = Server(int(address.rpartition(":")[2]))
    found = await server.answers(AMBIGUOUS[name] + HIDDEN)
    await weights.close()
    assert re.fullmatch(rb"HTTP/1.[01] 400.*", found, re.DOTALL), found
    assert len(re.findall(rb"HTTP/1\.[01] \d{3} ", found)) == 1, found  # it may quote the request
