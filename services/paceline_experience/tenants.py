"""Quotas of tenants, and what they use."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping

from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.config.base import Name
from paceline.config.load import explain
from paceline.config.quota import Quota
from paceline.errors import InvalidError
from paceline.logs import Log
from paceline.tenants import Tenant, Use
from paceline.types import JobState, WorkerKind
from paceline_experience.flight import Flight
from paceline_experience.jobs import JobStore
from paceline_experience.ledgers import Ledgers
from paceline_experience.quotas import Quotas
from paceline_experience.roster import Query, Roster
from paceline_experience.store import Store

log = Log("tenants")
_QUOTAS = "{registry}:quotas"  # hash: tenant -> its own quota (JSON)
_NAME: TypeAdapter[str] = TypeAdapter(Name)


class Tenants:
    """Quotas are in Redis; use is counted from job records, ledgers and roster whenever asked."""

    def __init__(
        self,
        *,
        store: Store,
        jobs: JobStore,
        ledgers: Ledgers,
        roster: Roster,
        flight: Flight,
        quotas: Quotas,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._ledgers = ledgers
        self._roster = roster
        self._flight = flight
        self._quotas = quotas
        self._elsewhere: Counter[str] = Counter()
        # What is read is older than what is written meanwhile, and must not replace it.
        self._reading = asyncio.Lock()
        self._unreadable: dict[str, bytes] = {}  # by tenant; each is logged once

    @property
    def default(self) -> Quota:
        """Of tenants that have none of their own."""
        return self._quotas.settings.tenant

    def quota(self, tenant: str) -> Quota:
        """What holds for a tenant."""
        return self._quotas.of(tenant)

    def elsewhere(self, tenant: str) -> int:
        """Episodes in flight of jobs that this process does not own, as of the last look."""
        return self._elsewhere[tenant]

    def stored(self, tenant: str) -> int:
        """Bytes of trajectories of its jobs that this process owns."""
        entries = self._ledgers.active.values()
        return sum(e.ledger.payload_bytes for e in entries if e.job.status.tenant == tenant)

    async def look(self) -> list[Tenant]:
        """Read quotas, and what jobs of other owners have in flight; all tenants, by name."""
        async with self._reading:
            found = await self._store.hashes(_QUOTAS)
            self._quotas.own = self._parsed({n.decode(): text for n, text in found[0].items()})
        states = await self._jobs.states()
        others = [
            (job_id, tenant)
            for job_id, tenant, state in states
            if job_id not in self._ledgers.active and state is not JobState.QUEUED
        ]
        leased = [await self._jobs.leased(tenant, job_id) for job_id, tenant in others]
        counts: Counter[str] = Counter()
        for (job_id, tenant), number in zip(others, leased, strict=True):
            if job_id not in self._ledgers.active:
                counts[tenant] += number
        self._elsewhere = counts
        return self._counted(states)

    def _parsed(self, texts: Mapping[str, bytes]) -> dict[str, Quota]:
        """Quotas by tenant; where one cannot be read, the one that was known before, if any."""
        found: dict[str, Quota] = {}
        unreadable: dict[str, bytes] = {}
        for tenant, text in texts.items():
            try:
                found[tenant] = Quota.model_validate_json(text)
            except ValidationError as error:
                unreadable[tenant] = text
                if tenant in self._quotas.own:
                    found[tenant] = self._quotas.own[tenant]
                if self._unreadable.get(tenant) != text:
                    problem = explain(error, Quota)
                    log.error("quota cannot be read", tenant=tenant, error=problem)
        self._unreadable = unreadable
        return found

    async def set(self, tenant: str, quota: Quota | None) -> Tenant:
        """Give a tenant a quota of its own, or None: the default again. What runs goes on.

        Raises:
            InvalidError: no tenant can have this name.
        """
        try:
            _NAME.validate_python(tenant)
        except ValidationError as error:
            raise InvalidError(f"tenant: {tenant!r}: {explain(error, BaseModel)}") from None
        async with self._reading:
            if quota is None:
                await self._store.command("HDEL", _QUOTAS, tenant)
                self._quotas.own.pop(tenant, None)
            else:
                await self._store.command("HSET", _QUOTAS, tenant, quota.model_dump_json())
                self._quotas.own[tenant] = quota
        log.info("quota set", tenant=tenant, quota=json.dumps(quota and quota.model_dump()))
        self._ledgers.wake()
        return (await self.tenants(tenant))[0]

    async def tenants(self, only: str = "") -> list[Tenant]:
        """All tenants with jobs that are not over or with a quota of their own, by name."""
        return self._counted(await self._jobs.states(), only)

    def _counted(self, states: list[tuple[str, str, JobState]], only: str = "") -> list[Tenant]:
        submitted = Counter(tenant for _, tenant, _ in states)
        running = Counter(tenant for _, tenant, state in states if state is not JobState.QUEUED)
        owners = {job_id: tenant for job_id, tenant, _ in states}
        rollouts = self._roster.workers(Query(kind=WorkerKind.ROLLOUT))
        workers = Counter(owners[w.job_id] for w in rollouts if w.job_id in owners)
        episodes = self._flight.by_tenant() + self._elsewhere
        names = [only] if only else sorted({*submitted, *self._quotas.own})
        return [
            Tenant(
                name=name,
                quota=self.quota(name),
                own=name in self._quotas.own,
                use=Use(
                    submitted[name],
                    running[name],
                    workers[name],
                    episodes[name],
                    self.stored(name),
                    **self._quotas.largest(name),
                ),
            )
            for name in names
        ]
