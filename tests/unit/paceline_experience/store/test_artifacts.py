import asyncio
import hashlib
from io import BytesIO

import pytest

from paceline.errors import NotFoundError, UnavailableError
from paceline_experience.store.artifacts import CHUNK_BYTES, ArtifactStore
from paceline_experience.store.store import Store


async def content(artifacts: ArtifactStore, digest: str) -> list[bytes]:
    return [chunk async for chunk in artifacts.chunks(digest)]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 1])
async def test_what_was_put_comes_back_in_pieces(store: Store, size: int) -> None:
    artifacts = ArtifactStore(store)
    data = bytes(i % 251 for i in range(251)) * (size // 251 + 1)
    digests = await artifacts.put({"tokenizer.json": data[:size]})
    assert digests == {"tokenizer.json": hashlib.sha256(data[:size]).hexdigest()}
    chunks = await content(artifacts, digests["tokenizer.json"])
    assert b"".join(chunks) == data[:size]
    assert all(len(chunk) <= CHUNK_BYTES for chunk in chunks)


async def test_the_same_content_is_kept_once(store: Store) -> None:
    artifacts = ArtifactStore(store)
    digests = await artifacts.put({"a": b"x", "b": b"x"})
    await artifacts.put({"c": b"x"})
    assert digests["a"] == digests["b"]
    assert await store.command("DBSIZE") == 1


async def test_an_unknown_digest_is_named(store: Store) -> None:
    with pytest.raises(NotFoundError, match="artifact 'beef' is not known"):
        await content(ArtifactStore(store), "beef")


async def test_code_that_a_job_needs_while_it_is_released_stays(store: Store) -> None:
    artifacts = ArtifactStore(store)
    await artifacts.put_code("t", "beef", BytesIO(bytes(5 * CHUNK_BYTES)), ["f"])

    async def release() -> None:
        async with artifacts.undisturbed(since=0):
            await artifacts.release_code("t", "beef")

    async def submit() -> None:
        async with artifacts.submitting():
            await artifacts.keep_code("t", "beef")

    await asyncio.gather(release(), submit())
    names = [name for name in await store.command("KEYS", "*") if b"uploads" not in name]
    assert len(names) == 7
    assert {await store.command("TTL", name) for name in names} == {-1}
    with pytest.raises(UnavailableError):
        await release()
