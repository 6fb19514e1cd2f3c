"""Content-addressed storage for small files of jobs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from paceline.digest import digest_of
from paceline.errors import LimitError, NotFoundError
from paceline.transport.principal import ALL_TENANTS
from paceline_experience.store.store import Store

CHUNK_BYTES = 1 << 20
UNUSED_S = 7 * 86400  # what no job has used is kept for so long
MAX_UPLOADED_BYTES = 256 << 20  # code of a tenant within that time


class ArtifactStore:
    """Blobs in Redis under their sha256."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Store files; returns their digests by name."""
        digests = {name: digest_of(data) for name, data in files.items()}
        for name, data in files.items():
            await self._store.command("SETNX", _key(digests[name]), data)
        return digests

    async def put_code(self, tenant: str, archive: bytes, names: Sequence[str]) -> str:
        """Store code, with the `names` in it, until a job keeps it; returns its digest.

        `tenant` has uploaded it, or may use it if that is `ALL_TENANTS`.

        Raises:
            LimitError: the tenant has uploaded too much lately.
        """
        digest = digest_of(archive)
        key = _code_key(tenant, digest)
        if not await self._store.command("EXISTS", key):
            await self._check_uploads(tenant, digest, len(archive))
        for name, value in ((_key(digest), archive), (key, json.dumps(list(names)))):
            await self._store.command("SET", name, value, "NX", "EX", UNUSED_S)
        return digest

    async def names_of(self, tenant: str, digest: str) -> list[str]:
        """The names in code that a tenant may use.

        Raises:
            NotFoundError: the tenant has not uploaded it, or long ago.
        """
        for owner in (tenant, ALL_TENANTS):
            names = await self._store.command("GET", _code_key(owner, digest))
            if names is not None and await self._store.command("EXISTS", _key(digest)):
                return json.loads(names)
        raise NotFoundError(f"code {digest!r} is not known")

    async def keep_code(self, tenant: str, digest: str) -> None:
        """Keep code for good, since a job needs it."""
        for key in (_key(digest), _code_key(tenant, digest), _code_key(ALL_TENANTS, digest)):
            await self._store.command("PERSIST", key)

    async def _check_uploads(self, tenant: str, digest: str, num_bytes: int) -> None:
        """Count an upload, unless there were too many in the time that they are kept for."""
        key, now = f"uploads:{tenant}", time.time()
        await self._store.command("ZREMRANGEBYSCORE", key, "-inf", now - UNUSED_S)
        members: list[bytes] = await self._store.command("ZRANGE", key, 0, -1)
        total = num_bytes + sum(int(each.rpartition(b":")[2]) for each in members)
        if total > MAX_UPLOADED_BYTES:
            raise LimitError(
                f"code: tenant {tenant!r} has uploaded {total - num_bytes} bytes within a week; "
                f"at most {MAX_UPLOADED_BYTES} are kept"
            )
        await self._store.command("ZADD", key, now, f"{digest}:{num_bytes}")
        await self._store.command("EXPIRE", key, UNUSED_S)

    async def tasks(self, name: str) -> bytes | None:
        """Stored tasks; None if there are none of this name, or nobody has asked for long."""
        await self._store.command("EXPIRE", f"tasks:{name}", UNUSED_S)
        return await self._store.command("GET", f"tasks:{name}")

    async def put_tasks(self, name: str, tasks: bytes) -> None:
        """Store tasks by a name that says what they were made from."""
        await self._store.command("SET", f"tasks:{name}", tasks, "EX", UNUSED_S)

    async def needs(self, name: str) -> dict[str, list[str]] | None:
        """What plug-ins of code declare by their fields; None as for `tasks`."""
        await self._store.command("EXPIRE", f"needs:{name}", UNUSED_S)
        found = await self._store.command("GET", f"needs:{name}")
        return None if found is None else json.loads(found)

    async def put_needs(self, name: str, needs: Mapping[str, Sequence[str]]) -> None:
        """Store needs by a name that says what declares them."""
        await self._store.command("SET", f"needs:{name}", json.dumps(needs), "EX", UNUSED_S)

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
