import hashlib

import pytest

from paceline.errors import NotFoundError
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
