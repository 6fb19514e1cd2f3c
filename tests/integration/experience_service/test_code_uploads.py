"""Archives of code on their way: client, gateway, experience, store, worker; always in pieces."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
import zipfile
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from paceline.config.quota import MIB, Quota
from paceline.errors import InvalidError, LimitError
from paceline.front.client.calls import Archive
from paceline.front.client.client import AsyncClient
from paceline.isolation.code.archive import check
from paceline.platform.digest import digest_of
from paceline.platform.server.artifacts import fetch_into
from paceline.platform.transport.rpc import connect
from paceline.platform.transport.sending import send
from paceline.v1 import experience_pb2 as ex
from paceline.v1 import jobs_pb2 as pb
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline_harness.experience_service.clients import Client

ADMIN = "pl_bootstrap_of_these_tests"
LARGE = 40 * MIB
KEYS = ("archive:*", "part:*", "code:*")


def archive_of(num_bytes: int) -> Archive:
    """An archive with so much in it that does not compress."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("scoring.py", "def score(item): return 1.0\n")
        archive.writestr("data.bin", os.urandom(num_bytes))
    data = file.getvalue()
    return Archive(file, digest_of(data), len(data))


async def stored(url: str, *patterns: str) -> list[int]:
    """Sizes of values of the store."""
    store = await Store.connect(url)
    redis: Any = store.redis
    keys = [key for each in patterns async for key in redis.scan_iter(each)]
    sizes = [await store.command("STRLEN", key) for key in keys]
    await store.close()
    return sizes


@pytest.fixture
async def mine(url: str) -> AsyncIterator[AsyncClient]:
    """Of a user of tenant `a`."""
    async with AsyncClient(url, token=ADMIN) as admin:
        token = (await admin.create_token("a", role="submit", tenant="a")).secret
    async with AsyncClient(url, token=token, outage_s=5.0) as made:
        yield made


async def pieces(
    data: bytes, *, digest: str = "", num_bytes: int = 0, size: int = MIB
) -> AsyncIterator[pb.UploadCodeRequest]:
    yield pb.UploadCodeRequest(digest=digest, num_bytes=num_bytes)
    for start in range(0, len(data), size):
        yield pb.UploadCodeRequest(archive=data[start : start + size])


async def test_a_large_archive_arrives_at_a_worker_and_nobody_has_all_of_it_in_memory(
    store_url: str, client: Client, mine: AsyncClient, tmp_path: Path
) -> None:
    archive = archive_of(LARGE)
    tracemalloc.start()
    try:
        made = await mine.upload(archive)
        with (tmp_path / "fetched").open("w+b") as there:
            await fetch_into(client.experience, made.digest, there)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LARGE / 2  # of client, gateway, experience and worker together
    assert made.digest == archive.digest
    with (tmp_path / "fetched").open("rb") as there:
        assert check(there) == ["scoring.py", "data.bin"]
    sizes = await stored(store_url, "part:*")
    assert max(sizes) == MIB
    assert sum(sizes) == archive.num_bytes
    await mine.upload(archive)  # once more
    assert len(await stored(store_url, "part:*")) == len(sizes)


async def test_what_is_not_whole_leaves_nothing_behind(
    store_url: str, client: Client, mine: AsyncClient, tmp_path: Path
) -> None:
    async with connect(client.address) as channel:
        jobs: JobsAsyncStub = JobsStub(channel)
        data = archive_of(3 * MIB).file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        for sent, told in (
            (pieces(data, digest="0" * 64), "arrived with the digest"),
            (pieces(data[:-1], num_bytes=len(data)), "bytes were sent, and .* announced"),
            (pieces(data, num_bytes=len(data) - 1), "bytes were sent, and .* announced"),
            (pieces(data[:-1]), "not a zip archive"),
            (pieces(b""), "not a zip archive"),
        ):
            with pytest.raises(InvalidError, match=told):
                await send(jobs.UploadCode, sent, timeout_s=PATIENCE_S)
        large = Quota().code_bytes + 1
        with pytest.raises(LimitError, match="limit code_bytes"):  # before it is sent
            await send(jobs.UploadCode, pieces(b"", num_bytes=large), timeout_s=PATIENCE_S)

        gone = asyncio.Event()

        async def breaks_off() -> AsyncIterator[bytes]:
            yield data[:MIB]
            await asyncio.sleep(0.3)
            gone.set()
            raise ConnectionError

        headers = {"authorization": f"Bearer {ADMIN}", "content-type": "application/zip"}
        async with httpx.AsyncClient(base_url=mine.url, headers=headers) as raw:
            with pytest.raises(ConnectionError):
                await raw.post("/v1/code", content=breaks_off())
        await asyncio.sleep(0.3)
        assert gone.is_set()
        assert await stored(store_url, *KEYS) == []
        reply = await send(jobs.UploadCode, pieces(data, num_bytes=len(data)), timeout_s=PATIENCE_S)
        assert reply.digest == digest_of(data)


async def test_a_user_of_grpc_sends_a_stream_or_one_message(
    url: str, grpc: str, store_url: str
) -> None:
    data = archive_of(2 * MIB).file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    async with connect(grpc, token=ADMIN) as channel:
        jobs: JobsAsyncStub = JobsStub(channel)
        reply = await send(
            jobs.UploadCode, pieces(data, digest=digest_of(data)), timeout_s=PATIENCE_S
        )
        assert (reply.digest, reply.num_files) == (digest_of(data), 2)
        method: Any = channel.unary_unary(  # as it was before it became a stream
            "/paceline.v1.Jobs/UploadCode",
            request_serializer=pb.UploadCodeRequest.SerializeToString,
            response_deserializer=pb.Code.FromString,
        )
        assert (await call(method, pb.UploadCodeRequest(archive=data))).digest == digest_of(data)


async def test_a_tenant_has_limits_for_an_archive_and_for_a_week(
    url: str, mine: AsyncClient
) -> None:
    async with AsyncClient(url, token=ADMIN) as admin:
        await admin.set_quota("a", quota=Quota(code_bytes=2 * MIB, uploaded_bytes=4 * MIB))
    await asyncio.sleep(0.2)
    with pytest.raises(LimitError, match=r"limit code_bytes: .* tenant 'a'"):
        await mine.upload(archive_of(20 * MIB))  # the answer arrives, although much is on its way
    first = archive_of(3 * MIB // 2)
    for each in (first, archive_of(3 * MIB // 2), first):
        await mine.upload(each)
    with pytest.raises(LimitError, match=r"limit uploaded_bytes: .* --uploaded-bytes"):
        await mine.upload(archive_of(3 * MIB // 2))


async def test_an_interrupted_download_goes_on_where_it_was(
    client: Client, mine: AsyncClient
) -> None:
    archive = archive_of(3 * MIB)
    await mine.upload(archive)
    whole = BytesIO()
    await fetch_into(client.experience, archive.digest, whole)
    for offset in (0, 1, MIB, 2 * MIB + 5, archive.num_bytes):
        request = ex.GetArtifactRequest(digest=archive.digest, offset=offset)
        rest = [each.data async for each in client.experience.GetArtifact(request)]
        assert b"".join(rest) == whole.getvalue()[offset:]
