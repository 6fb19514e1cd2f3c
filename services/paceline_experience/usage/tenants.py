"""Quotas and usage of tenants."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping

from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.config.base import Name
from paceline.config.load import explain
from paceline.config.quota import Quota
from paceline.enums import JobState, WorkerKind
from paceline.errors import InvalidError
from paceline.front.api.tenants import Tenant, TenantUsage
from paceline.platform.telemetry.logs import Log
from paceline_experience.dispatch.slots import SlotAccounting
from paceline_experience.fleet.roster import Query, Roster
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.store.store import Store
from paceline_experience.tenancy.quotas import Quotas

log = Log("tenants")
_QUOTAS = "{registry}:quotas"  # hash: tenant -> its own quota (JSON)
_NAME: TypeAdapter[str] = TypeAdapter(Name)


class Tenants:
    """Quotas are in Redis; usage is counted from job records, ledgers and roster on demand."""

    def __init__(
        self,
        *,
        store: Store,
        jobs: JobStore,
        ledgers: Ledgers,
        roster: Roster,
        accounting: SlotAccounting,
        quotas: Quotas,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._ledgers = ledgers
        self._roster = roster
        self._accounting = accounting
        self._quotas = quotas
        self._leased_elsewhere: Counter[str] = Counter()
        # A read must not overwrite a quota that was set after it began.
        self._reading = asyncio.Lock()
        self._unreadable: dict[str, bytes] = {}  # by tenant; each is logged once

    @property
    def default(self) -> Quota:
        """The quota of tenants without one of their own."""
        return self._quotas.settings.tenant

    def quota(self, tenant: str) -> Quota:
        """The quota of a tenant."""
        return self._quotas.of(tenant)

    def leased_elsewhere(self, tenant: str) -> int:
        """Leased episodes of jobs that this process does not own, as of the last `refresh`."""
        return self._leased_elsewhere[tenant]

    def stored_bytes(self, tenant: str) -> int:
        """Size in bytes of the trajectories of its jobs that this process owns."""
        entries = self._ledgers.active.values()
        return sum(e.ledger.payload_bytes for e in entries if e.job.status.tenant == tenant)

    async def refresh(self) -> list[Tenant]:
        """Reload quotas and the leases of jobs of other owners; returns all tenants by name."""
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
        self._leased_elsewhere = counts
        return self._counted(states)

    def _parsed(self, texts: Mapping[str, bytes]) -> dict[str, Quota]:
        """Quotas by tenant; where one cannot be read, the previous one, if any."""
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

    def own_quota(self, tenant: str) -> Quota | None:
        """The quota that a tenant was given; None: that of all others applies."""
        return self._quotas.own.get(tenant)

    async def set(self, tenant: str, quota: Quota | None) -> Tenant:
        """Set a tenant's quota, or None: back to the default. Running jobs go on.

        Raises:
            InvalidError: not a valid name of a tenant.
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
        """All tenants with live jobs or with a quota of their own, by name."""
        return self._counted(await self._jobs.states(), only)

    def _counted(self, states: list[tuple[str, str, JobState]], only: str = "") -> list[Tenant]:
        submitted = Counter(tenant for _, tenant, _ in states)
        running = Counter(tenant for _, tenant, state in states if state is not JobState.QUEUED)
        owners = {job_id: tenant for job_id, tenant, _ in states}
        rollouts = self._roster.workers(Query(kind=WorkerKind.ROLLOUT))
        workers = Counter(owners[w.job_id] for w in rollouts if w.job_id in owners)
        episodes = self._accounting.by_tenant() + self._leased_elsewhere
        names = [only] if only else sorted({*submitted, *self._quotas.own})
        return [
            Tenant(
                name=name,
                quota=self.quota(name),
                is_custom=name in self._quotas.own,
                usage=TenantUsage(
                    submitted[name],
                    running[name],
                    workers[name],
                    episodes[name],
                    self.stored_bytes(name),
                    **self._quotas.largest(name),
                ),
            )
            for name in names
        ]
