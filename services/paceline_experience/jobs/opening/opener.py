"""Makes the ledger of a job from its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.config.service import ExperienceOptions
from paceline.platform.telemetry.tracing import Tracer
from paceline.types import Job
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.ledger.context import Hooks
from paceline_experience.ledger.ledger import JobLedger, LedgerJob
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.ledger.own.parts import OwnParts
from paceline_experience.ledger.sources import Sources
from paceline_experience.store.clock import Clock
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.payloads import RedisPayloads
from paceline_experience.store.store import Store
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.quotas import JobLimits, Quotas


class MakesHooks(Protocol):
    """Makes the callbacks of a job's ledger."""

    def __call__(self, job: Job, main_eval: str | None, /) -> Hooks:
        """`main_eval`: name of the evaluation that the job's status shows."""
        ...


class LedgerOpener:
    """Opens ledgers, all with the same store, options and limits."""

    def __init__(
        self,
        *,
        store: Store,
        options: ExperienceOptions,
        quotas: Quotas,
        hooks: MakesHooks,
        tracer: Tracer,
        meter: Callable[[str], JobMeter],
        new_clock: Callable[[], Clock],
    ) -> None:
        """`meter` returns that of a job, by its id; `new_clock` one for a job."""
        self._store = store
        self._options = options
        self._quotas = quotas
        self._hooks = hooks
        self._tracer = tracer
        self._meter = meter
        self._new_clock = new_clock

    async def open(
        self,
        job: Job,
        parts: JobParts,
        sources: Sources,
        *,
        epoch: int,
        watermarks: Watermarks,
        own: OwnParts,
    ) -> JobLedger:
        """An open ledger.

        Raises:
            StoreError, UnavailableError: the store does not answer.
            PacelineError: what is stored cannot be read.
        """
        tenant, job_id = job.status.tenant, job.status.job_id
        ledger = JobLedger(
            store=self._store,
            job=LedgerJob(job_id, tenant, parts.spec, epoch),
            sources=sources,
            payloads=RedisPayloads(self._store, JobKeys(tenant, job_id).payloads),
            hooks=self._hooks(job, parts.spec.main_eval),
            options=self._options,
            limits=JobLimits(tenant, self._quotas),
            clock=self._new_clock(),
            watermarks=watermarks,
            tracer=self._tracer,
            meter=self._meter(job_id),
            own=own,
        )
        await ledger.open()
        return ledger
