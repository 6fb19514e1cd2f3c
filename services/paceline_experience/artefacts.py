"""Small files of jobs, kept once by the digest of their content."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping

from paceline.errors import NotFoundError
from paceline_experience.store import Store

PIECE_BYTES = 1 << 20


class Artefacts:
    """Blobs in Redis under their sha256."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Keep files; their digests by name."""
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        for name, data in files.items():
            await self._store.command("SETNX", _key(digests[name]), data)
        return digests

    async def pieces(self, digest: str) -> AsyncIterator[bytes]:
        """The content, a piece of at most 1 MiB at a time.

        Raises:
            NotFoundError: nothing with this digest was put.
        """
        key = _key(digest)
        if not await self._store.command("EXISTS", key):
            raise NotFoundError(f"artefact {digest!r} is not known")
        size = await self._store.command("STRLEN", key)
        for start in range(0, size, PIECE_BYTES):
            yield await self._store.command("GETRANGE", key, start, start + PIECE_BYTES - 1)


def _key(digest: str) -> str:
    return f"artefact:{digest}"
