import hashlib

import pytest

from paceline.errors import NotFoundError
from paceline_experience.artefacts import PIECE_BYTES, Artefacts
from paceline_experience.store import Store


async def content(artefacts: Artefacts, digest: str) -> list[bytes]:
    return [piece async for piece in artefacts.pieces(digest)]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1])
async def test_what_was_put_comes_back_in_pieces(store: Store, size: int) -> None:
    artefacts = Artefacts(store)
    data = bytes(i % 251 for i in range(251)) * (size // 251 + 1)
    digests = await artefacts.put({"tokenizer.json": data[:size]})
    assert digests == {"tokenizer.json": hashlib.sha256(data[:size]).hexdigest()}
    pieces = await content(artefacts, digests["tokenizer.json"])
    assert b"".join(pieces) == data[:size]
    assert all(len(piece) <= PIECE_BYTES for piece in pieces)


async def test_the_same_content_is_kept_once(store: Store) -> None:
    artefacts = Artefacts(store)
    digests = await artefacts.put({"a": b"x", "b": b"x"})
    await artefacts.put({"c": b"x"})
    assert digests["a"] == digests["b"]
    assert await store.command("DBSIZE") == 1


async def test_an_unknown_digest_is_named(store: Store) -> None:
    with pytest.raises(NotFoundError, match="artefact 'beef' is not known"):
        await content(Artefacts(store), "beef")
