"""One job's ledger on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.config import JobSpec
from paceline.config.limits import LimitSettings
from paceline.config.service import ExperienceOptions
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF
from paceline.plugins import TaskSource
from paceline.types import (
    Assignment,
)
from paceline_experience.ledger.ledger import BatchShare, JobLedger, LedgerJob
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.sources import Sources
from paceline_experience.store.clock import Clock
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.payloads import RedisPayloads
from paceline_experience.store.store import Store
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.quotas import JobLimits, Quotas
from paceline_harness.ledgers.episodes import FakeClock, Numbers, RecordingHooks, made, whole


@dataclass(slots=True)
class World:
    """One job's ledger on a real store, with a fake clock."""

    store: Store
    spec: JobSpec
    clock: FakeClock
    hooks: RecordingHooks
    job_id: str = "j1"
    num_tasks: int = 1000
    num_eval_tasks: int = 4
    tasks: TaskSource | None = None
    limits: LimitSettings = field(default_factory=LimitSettings)
    watermarks: Callable[[], Watermarks] = Watermarks
    own: OwnParts = NO_PARTS

    made = staticmethod(made)
    whole = staticmethod(whole)

    def ledger(self, *, epoch: int = 0, clock: Clock | None = None) -> JobLedger:
        """A new ledger on the contents of the store, as after a restart."""
        return JobLedger(
            store=self.store,
            job=LedgerJob(self.job_id, "default", self.spec, epoch),
            sources=Sources(
                self.tasks or Numbers(self.num_tasks),
                {name: Numbers(self.num_eval_tasks) for name in self.spec.eval_sets},
            ),
            payloads=RedisPayloads(self.store, JobKeys("default", self.job_id).payloads),
            hooks=self.hooks,
            options=ExperienceOptions(),
            limits=JobLimits("default", Quotas(self.limits)),
            clock=clock or self.clock,
            watermarks=self.watermarks(),
            tracer=OFF,
            meter=JobMeter(Metrics(), self.job_id),
            own=self.own,
        )

    async def opened(self, *, clock: Clock | None = None) -> JobLedger:
        ledger = self.ledger(clock=clock)
        await ledger.open()
        return ledger

    async def started(self, *, clock: Clock | None = None) -> JobLedger:
        """An open ledger with incarnation 1 and version 0 of step 0."""
        ledger = await self.opened(clock=clock)
        incarnation = await ledger.grant_incarnation()
        await ledger.rewind(incarnation=incarnation, step=0)
        await ledger.publish_version(incarnation=incarnation, step=0, parent=-1, num_bytes=10)
        return ledger

    async def filled(self, ledger: JobLedger, *, version: int = 0) -> list[Assignment]:
        """Lease and submit everything available."""
        leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
        await ledger.submit(whole(leased, version=version))
        return leased

    async def trained(self, ledger: JobLedger, step: int, *, incarnation: int = 1) -> BatchShare:
        """Take and commit the batch of a step, and announce the resulting version."""
        share = await ledger.take(incarnation=incarnation, step=step, rank=0, world=1)
        await ledger.commit(incarnation=incarnation, step=step, batch_id=share.batch_id, metrics={})
        await ledger.publish_version(
            incarnation=incarnation, step=step + 1, parent=step, num_bytes=10
        )
        return share

    async def waiting(self, ledger: JobLedger, step: int) -> asyncio.Task[BatchShare]:
        """A trainer that waits for the batch of a step."""
        call = ledger.take(incarnation=1, step=step, rank=0, world=1)
        task = asyncio.create_task(call)
        while not (await ledger.live()).waiting:
            await asyncio.sleep(0.001)
        return task

    async def payloads(self) -> set[str]:
        """Names of all stored payloads."""
        names = await self.store.command("HKEYS", JobKeys("default", self.job_id).payloads)
        return {name.decode() for name in names}

    async def clean(self, ledger: JobLedger) -> dict[str, int]:
        """Audit the ledger; returns its counts."""
        report = await ledger.verify()
        assert report.ok, report.problems
        return {**report.counts, **report.dropped}


Worlds = Callable[..., World]
