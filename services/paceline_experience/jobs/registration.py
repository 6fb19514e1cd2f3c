"""Ids of jobs that have no record yet: given once for each request, prepared, or abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

from paceline.errors import QuotaError, StoreError
from paceline_experience.jobs.record import Value
from paceline_experience.jobs.registry import (
    INDEX,
    LIVE,
    REQUESTS,
    SEQUENCE,
    TENANTS,
    Registry,
)
from paceline_experience.store.keys import job_key
from paceline_experience.store.store import Store


@dataclass(frozen=True, slots=True)
class JobRequest:
    """Who asks for which job; `max_live`: how many live jobs the tenant may have, None: any."""

    name: str
    tenant: str
    request_id: str
    max_live: int | None


class Registration:
    """One request has one id, which one caller at a time prepares, writes or abandons."""

    def __init__(self, store: Store, *, registry: Registry, new_suffix: Callable[[], str]) -> None:
        self._store = store
        self._registry = registry
        self._new_suffix = new_suffix
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    async def register(self, request: JobRequest) -> str:
        """The id for a request: a new one, or that of an earlier attempt.

        Raises:
            DeletedError: its job was deleted.
            QuotaError: the tenant has `max_live` jobs that are not over.
        """
        keys = [TENANTS, REQUESTS, INDEX, LIVE, SEQUENCE]
        limit = -1 if request.max_live is None else request.max_live
        while True:
            wanted = f"{request.name}-{self._new_suffix()}"
            arguments = (wanted, request.tenant, request.request_id, limit)
            reply = await self._store.run("job_register", keys, *arguments)
            if isinstance(reply, int):
                raise quota_error(request.tenant, reply, limit)
            if reply:
                return reply.decode()

    async def prepare(
        self, request: JobRequest, make: Callable[[str], Awaitable[Mapping[str, Value]]]
    ) -> Mapping[str, Value]:
        """Make what a job needs before anybody sees it, unless it has been created already.

        `make` gets its id, and returns further fields of its record. If it fails, what it has left
        is deleted, and the request may come again.

        Raises:
            DeletedError, QuotaError: as for `register`.
            UnavailableError: what an earlier attempt has left is still being deleted.
        """
        job_id = await self.register(request)
        async with self.writing(job_id):
            if await self._has_record(request.tenant, job_id):
                return {}
            made: Mapping[str, Value] | None = None
            try:
                made = await make(job_id)
                return made
            finally:
                if made is None:
                    with suppress(StoreError):  # then a sweep finds it
                        await asyncio.shield(self._registry.abandon(job_id, request.tenant))

    @asynccontextmanager
    async def writing(self, job_id: str) -> AsyncGenerator[None]:
        """While the first keys of a job are written: nobody else writes or abandons them.

        Raises:
            UnavailableError: what an earlier attempt has left is still being deleted.
        """
        async with self._lock(job_id):
            await self._registry.check_kept(job_id)
            yield

    async def abandon(self, tenant: str, job_id: str) -> bool:
        """Have a job deleted that has no record; False: it has one, or somebody makes one."""
        lock = self._lock(job_id)
        if lock.locked():
            return False
        async with lock:
            if await self._has_record(tenant, job_id):
                return False
            await self._registry.abandon(job_id, tenant)
            return True

    async def unfinished(self) -> list[str]:
        """Live ids without a record for which nobody does anything at present."""
        found = await self._registry.without_record()
        return [job_id for job_id in found if job_id not in self._locks]

    async def _has_record(self, tenant: str, job_id: str) -> bool:
        return bool(await self._store.command("EXISTS", job_key(tenant, job_id, "record")))

    def _lock(self, job_id: str) -> asyncio.Lock:
        return self._locks.setdefault(job_id, asyncio.Lock())


def quota_error(tenant: str, used: int, limit: int) -> QuotaError:
    """The tenant has as many live jobs as it may."""
    return QuotaError(
        f"quota submitted: tenant {tenant!r} has {used} jobs that are not over, of {limit} "
        "allowed; wait for one to end, cancel one, or ask an admin of the installation for more "
        f"(`paceline tenants set {tenant} --submitted N`)"
    )
