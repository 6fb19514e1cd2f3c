"""Content-addressed storage for small files of jobs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping

from paceline.errors import NotFoundError
from paceline_experience.store.store import Store

CHUNK_BYTES = 1 << 20


class ArtifactStore:
    """Blobs in Redis under their sha256."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Store files; returns their digests by name."""
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        for name, data in files.items():
            await self._store.command("SETNX", _key(digests[name]), data)
        return digests

    async def chunks(self, digest: str) -> AsyncIterator[bytes]:
        """The content in chunks of at most 1 MiB.

        Raises:
            NotFoundError: nothing with this digest is stored.
        """
        key = _key(digest)
        if not await self._store.command("EXISTS", key):
            raise NotFoundError(f"artifact {digest!r} is not known")
        size = await self._store.command("STRLEN", key)
        for start in range(0, size, CHUNK_BYTES):
            yield await self._store.command("GETRANGE", key, start, start + CHUNK_BYTES - 1)


def _key(digest: str) -> str:
    return f"artifact:{digest}"
