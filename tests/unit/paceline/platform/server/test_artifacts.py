"""Fetching an artifact over streams that break or hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import grpc
import pytest
from grpc import aio

from paceline.errors import DeadlineError, IntegrityError, UnavailableError
from paceline.platform.digest import digest_of
from paceline.platform.server.artifacts import fetch_into
from paceline.v1 import experience_pb2 as pb
from paceline.v1.experience_pb2_grpc import (
    ExperienceServicer,
    ExperienceStub,
    add_ExperienceServicer_to_server,
)

DATA = bytes(range(256)) * 40
CHUNK = 1000


class Breaking(ExperienceServicer):
    """Breaks off after some chunks."""

    def __init__(self) -> None:
        self.chunks = 3
        self.hangs = False
        self.offsets: list[int] = []

    async def GetArtifact(
        self, request: pb.GetArtifactRequest, context: Any
    ) -> AsyncIterator[pb.ArtifactChunk]:
        self.offsets.append(request.offset)
        for start in range(request.offset, len(DATA), CHUNK)[: self.chunks]:
            yield pb.ArtifactChunk(data=DATA[start : start + CHUNK])
        if self.hangs:
            await asyncio.sleep(60)
        if request.offset + self.chunks * CHUNK < len(DATA):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


@pytest.fixture
async def served() -> AsyncIterator[tuple[Breaking, Any]]:
    server = aio.server()
    breaking = Breaking()  # pyright: ignore[reportAbstractUsage]
    add_ExperienceServicer_to_server(breaking, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield breaking, ExperienceStub(channel)
    await server.stop(0)


async def test_a_stream_that_breaks_goes_on_where_it_was(served: tuple[Breaking, Any]) -> None:
    breaking, stub = served
    into = BytesIO()
    await fetch_into(stub, digest_of(DATA), into)
    assert into.getvalue() == DATA
    assert breaking.offsets == [0, 3000, 6000, 9000]


async def test_one_that_gets_nowhere_or_hangs_is_given_up(served: tuple[Breaking, Any]) -> None:
    breaking, stub = served
    breaking.chunks = 0
    with pytest.raises(UnavailableError, match="gone"):
        await fetch_into(stub, digest_of(DATA), BytesIO())
    breaking.hangs = True
    with pytest.raises(DeadlineError, match=r"nothing arrived for 0\.05 s"):
        await fetch_into(stub, digest_of(DATA), BytesIO(), chunk_s=0.05)


async def test_other_bytes_are_refused(served: tuple[Breaking, Any]) -> None:
    breaking, stub = served
    breaking.chunks = 100
    with pytest.raises(IntegrityError):
        await fetch_into(stub, "0" * 64, BytesIO())
