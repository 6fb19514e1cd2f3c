"""Content-addressed storage for files of jobs; archives of code are stored in parts."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import BinaryIO

from paceline.errors import NotFoundError, UnavailableError
from paceline.platform.digest import digest_of
from paceline.platform.transport.principal import ALL_TENANTS
from paceline_experience.store.store import Store

CHUNK_BYTES = 1 << 20
UNUSED_S = 7 * 86400  # what no job has used is kept for so long
_HELD_S = 86400  # parts outlive what names them
_STARTED_S = 3600  # parts of an upload that nothing names yet


class ArtifactStore:
    """Blobs in Redis under their sha256."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.submissions = 0  # so far
        self._submitting = 0
        self._lock = asyncio.Lock()  # held while files are deleted

    @asynccontextmanager
    async def submitting(self) -> AsyncGenerator[None]:
        """While a job is stored whose files may be those of a job that is being deleted."""
        async with self._lock:
            self.submissions += 1
            self._submitting += 1
        try:
            yield
        finally:
            self._submitting -= 1

    @asynccontextmanager
    async def undisturbed(self, *, since: int) -> AsyncGenerator[None]:
        """While files of jobs are deleted: no job is submitted, and none was since that many.

        Raises:
            UnavailableError: one was, or is being submitted.
        """
        async with self._lock:
            if self._submitting or self.submissions != since:
                raise UnavailableError("jobs are being submitted; its files are deleted later")
            yield

    async def discard(self, digests: Collection[str]) -> None:
        """Delete files that no job refers to any more."""
        if digests:
            await self._store.command("UNLINK", *map(_key, sorted(digests)))

    async def release_code(self, tenant: str, digest: str) -> None:
        """No job needs this code any more: it is kept as long as what was just uploaded."""
        parts = await self._parts(digest)
        for key in (_parts_key(digest), _key(digest), _code_key(tenant, digest)):
            await self._store.command("EXPIRE", key, UNUSED_S)
        for part in parts:
            await self._store.command("EXPIRE", part, UNUSED_S + _HELD_S)

    async def put(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Store files; returns their digests by name."""
        digests = {name: digest_of(data) for name, data in files.items()}
        for name, data in files.items():
            await self._store.command("SETNX", _key(digests[name]), data)
        return digests

    async def put_code(
        self, tenant: str, digest: str, archive: BinaryIO, names: Sequence[str]
    ) -> None:
        """Store code, with the `names` in it, until a job keeps it.

        `tenant` has uploaded it, or may use it if that is `ALL_TENANTS`.
        """
        if not await self._stored(digest):
            await self._put_parts(digest, archive)
        num_bytes = archive.seek(0, os.SEEK_END)
        key = _code_key(tenant, digest)
        if await self._store.command("SET", key, json.dumps(list(names)), "NX", "EX", UNUSED_S):
            uploads = f"uploads:{tenant}"
            await self._store.command("ZADD", uploads, time.time(), f"{digest}:{num_bytes}")
            await self._store.command("EXPIRE", uploads, UNUSED_S)

    async def _put_parts(self, digest: str, archive: BinaryIO) -> None:
        """Store an archive in parts; nobody sees one of which some are missing."""
        upload, parts = uuid.uuid4().hex, list[str]()
        archive.seek(0)
        try:
            while data := archive.read(CHUNK_BYTES):
                parts.append(f"part:{upload}:{len(parts)}")
                await self._store.command("SET", parts[-1], data, "EX", _STARTED_S)
            for part in parts:
                await self._store.command("EXPIRE", part, UNUSED_S + _HELD_S)
            named = ("SET", _parts_key(digest), json.dumps(parts), "NX", "EX", UNUSED_S)
            if await self._store.command(*named):
                parts = []
        finally:
            for part in parts:  # somebody else was faster, or it has failed
                await self._store.command("DEL", part)

    async def _stored(self, digest: str) -> bool:
        keys = (_parts_key(digest), _key(digest))
        return any([await self._store.command("EXISTS", key) for key in keys])

    async def names_of(self, tenant: str, digest: str) -> list[str]:
        """The names in code that a tenant may use.

        Raises:
            NotFoundError: the tenant has not uploaded it, or long ago.
        """
        for owner in (tenant, ALL_TENANTS):
            names = await self._store.command("GET", _code_key(owner, digest))
            if names is not None and await self._stored(digest):
                return json.loads(names)
        raise NotFoundError(f"code {digest!r} is not known")

    async def keep_code(self, tenant: str, digest: str) -> None:
        """Keep code for good, since a job needs it."""
        parts = await self._parts(digest)
        whole = (_parts_key(digest), _key(digest))
        for key in (*parts, *whole, _code_key(tenant, digest), _code_key(ALL_TENANTS, digest)):
            await self._store.command("PERSIST", key)

    async def uploaded(self, tenant: str, digest: str) -> int:
        """Bytes of code that a tenant has uploaded within a week, besides what has this digest."""
        key, now = f"uploads:{tenant}", time.time()
        await self._store.command("ZREMRANGEBYSCORE", key, "-inf", now - UNUSED_S)
        members: list[bytes] = await self._store.command("ZRANGE", key, 0, -1)
        found = (each.decode().rpartition(":") for each in members)
        return sum(int(size) for known, _, size in found if known != digest)

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

    async def copy(self, digest: str, into: BinaryIO) -> None:
        """Write the content to a file; raises as `chunks`."""
        async for data in self.chunks(digest):
            into.write(data)

    async def chunks(self, digest: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The content from an offset, in chunks of at most 1 MiB.

        Raises:
            NotFoundError: nothing with this digest is stored.
        """
        if parts := await self._parts(digest):
            for part in parts[offset // CHUNK_BYTES :]:
                data: bytes | None = await self._store.command("GET", part)
                if data is None:
                    raise NotFoundError(f"artifact {digest!r} is not known any more")
                yield data[offset % CHUNK_BYTES :]
                offset = 0
            return
        key = _key(digest)
        if not await self._store.command("EXISTS", key):
            raise NotFoundError(f"artifact {digest!r} is not known")
        size = await self._store.command("STRLEN", key)
        for start in range(offset, size, CHUNK_BYTES):
            yield await self._store.command("GETRANGE", key, start, start + CHUNK_BYTES - 1)

    async def _parts(self, digest: str) -> list[str]:
        """Keys of the parts of an archive, each but the last of 1 MiB; none: it is not in parts."""
        stored = await self._store.command("GET", _parts_key(digest))
        return [] if stored is None else json.loads(stored)


def _parts_key(digest: str) -> str:
    return f"archive:{digest}"


def _code_key(tenant: str, digest: str) -> str:
    return f"code:{tenant}:{digest}"


def _key(digest: str) -> str:
    return f"artifact:{digest}"
