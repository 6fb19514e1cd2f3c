"""Content-addressed storage for small files of jobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence

from paceline.errors import NotFoundError
from paceline.transport.principal import ALL_TENANTS
from paceline_experience.store.store import Store

CHUNK_BYTES = 1 << 20
UNUSED_S = 7 * 86400  # code that no job uses is kept for so long


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

    async def put_code(self, tenant: str, archive: bytes, names: Sequence[str]) -> str:
        """Store code, with the `names` in it; returns its digest.

        `tenant` has uploaded it, or may use it if that is `ALL_TENANTS`.
        """
        digest = hashlib.sha256(archive).hexdigest()
        new = await self._store.command("SETNX", _key(digest), archive)
        if new or await self._store.command("TTL", _key(digest)) >= 0:
            await self._store.command("EXPIRE", _key(digest), UNUSED_S)
        key = _code_key(tenant, digest)
        await self._store.command("SET", key, json.dumps(list(names)), "EX", UNUSED_S)
        return digest

    async def use_code(self, tenant: str, digest: str) -> list[str]:
        """Keep code for good, since a job needs it; returns the names in it.

        Raises:
            NotFoundError: the tenant has not uploaded it, or long ago.
        """
        for key in (_code_key(tenant, digest), _code_key(ALL_TENANTS, digest)):
            await self._store.command("PERSIST", key)
            await self._store.command("PERSIST", _key(digest))
            names = await self._store.command("GET", key)
            if names is not None and await self._store.command("EXISTS", _key(digest)):
                return json.loads(names)
        raise NotFoundError(f"code {digest!r} is not known")

    async def tasks(self, name: str) -> bytes | None:
        """Stored tasks; None if there are none of this name."""
        return await self._store.command("GET", f"tasks:{name}")

    async def put_tasks(self, name: str, tasks: bytes) -> None:
        """Store tasks by a name that says what they were made from."""
        await self._store.command("SET", f"tasks:{name}", tasks)

    async def whole(self, digest: str) -> bytes:
        """The content; raises as `chunks`."""
        return b"".join([data async for data in self.chunks(digest)])

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


def _code_key(tenant: str, digest: str) -> str:
    return f"code:{tenant}:{digest}"


def _key(digest: str) -> str:
    return f"artifact:{digest}"
