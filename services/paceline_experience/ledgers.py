"""The ledgers of all live jobs in this process, and those of past jobs somebody looks at."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from paceline.config import JobSpec
from paceline.config.limits import LimitSettings
from paceline.config.service import ExperienceOptions
from paceline.errors import FencedError, InvalidError, PacelineError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.tracing import OFF, Tracer
from paceline.types import Job, JobState
from paceline_experience.core import Hooks, Signal
from paceline_experience.history import History
from paceline_experience.jobs import JobStore
from paceline_experience.keys import JobKeys
from paceline_experience.ledger import JobLedger
from paceline_experience.meter import JobMeter
from paceline_experience.payloads import RedisPayloads
from paceline_experience.quotas import JobLimits, Quotas
from paceline_experience.sources import Sources, task_sources
from paceline_experience.store import Store
from paceline_experience.watermarks import Watermarks

log = Log("ledgers")
_PAST = 8


@dataclass(slots=True)
class Entry:
    """One open ledger. `epoch` is that of the ownership under which it was opened."""

    job: Job
    spec: JobSpec
    ledger: JobLedger
    epoch: int = 0
    pump: asyncio.Task[None] | None = None


class Ledgers:
    """Opens, finds and retires ledgers. One replica owns a job: it holds the job's lease."""

    def __init__(
        self,
        *,
        store: Store,
        jobs: JobStore,
        history: History,
        hooks: Callable[[Job], Hooks],
        opened: Callable[[Job, JobLedger], Awaitable[None]],
        options: ExperienceOptions,
        owner: str,
        quotas: Quotas | None = None,
        watermarks: Callable[[str], Watermarks] = lambda _: Watermarks(),
        tracer: Tracer = OFF,
        meter: Callable[[str], JobMeter] | None = None,
    ) -> None:
        self._meter = meter or partial(JobMeter, Metrics())
        self.active: dict[str, Entry] = {}
        self.listeners: set[Signal] = set()
        self._store = store
        self._jobs = jobs
        self._history = history
        self._hooks = hooks
        self._opened = opened
        self._options = options
        self._owner = owner
        self._quotas = quotas or Quotas(LimitSettings())
        self._watermarks = watermarks
        self._tracer = tracer
        self._foreign = False
        self._past: OrderedDict[str, Entry] = OrderedDict()
        self._opening = asyncio.Lock()
        self._next = ""  # the job that is about to become active

    async def open_all(self) -> None:
        """Take every live job that no other replica owns."""
        self._foreign = False
        for job in await self._jobs.live():
            if job.status.job_id in self.active:
                continue
            try:
                await self.activate(job)
            except FencedError as error:
                self._foreign = True
                log.info("not ours", job=job.status.job_id, error=error)
            except InvalidError as error:  # e.g. a plug-in is no longer installed
                log.error("cannot reopen", job=job.status.job_id, error=error)
                reason = f"cannot be reopened: {error}"
                await self._jobs.step(job.status.job_id, JobState.FAILED, reason=reason)

    async def activate(self, job: Job, sources: Sources | None = None) -> JobLedger:
        """Own a job and open its ledger.

        Raises:
            FencedError: another replica owns it.
        """
        async with self._opening:
            found = self.active.get(job.status.job_id)
            if found is not None:
                return found.ledger
            lease_s = self._options.member_lease_s
            epoch = await self._jobs.claim(job, self._owner, lease_s=lease_s)
            if epoch == 0:
                raise FencedError(f"job {job.status.job_id} is owned by another replica")
            self._next = job.status.job_id
            try:
                entry = await self._open(job, sources, epoch=epoch)
                await self._history.open(job)
                await self._opened(job, entry.ledger)
                entry.pump = asyncio.create_task(self._pump(entry.ledger), name="pump")
                self.active[job.status.job_id] = entry
            finally:
                self._next = ""
        self.wake()
        return entry.ledger

    def live(self, job_id: str) -> bool:
        """Whether a job is active here, or about to be."""
        return job_id in self.active or job_id == self._next

    async def get(self, job_id: str) -> JobLedger:
        """The ledger of any job.

        Raises:
            NotFoundError: no job has this id.
        """
        found = self.peek(job_id)
        if found is not None:
            return found
        job = await self._jobs.get(job_id)
        if not job.status.state.terminal:
            return await self.activate(job)
        async with self._opening:
            entry = self._past.get(job_id)
            if entry is None:
                entry = await self._open(job, None, epoch=await self._jobs.epoch(job))
            self._keep(job_id, entry)
            return entry.ledger

    def peek(self, job_id: str) -> JobLedger | None:
        """The ledger of a job if it is open."""
        entry = self.active.get(job_id) or self._past.get(job_id)
        return entry.ledger if entry else None

    def retire(self, job_id: str) -> None:
        """The job is over: nothing is leased from it, and nothing sweeps it, any more."""
        entry = self.active.pop(job_id, None)
        if entry is not None:
            self._stop(entry)
            self._keep(job_id, entry)

    def wake(self) -> None:
        """There may be work for the lease streams."""
        for signal in self.listeners:
            signal.fire()

    async def renew(self) -> None:
        """Stay the owner of what is ours; let go of what another has taken."""
        for job_id, entry in list(self.active.items()):
            epoch = await self._jobs.claim(
                entry.job, self._owner, lease_s=self._options.member_lease_s, epoch=entry.epoch
            )
            if epoch == 0 and self.active.get(job_id) is entry:
                log.warning("lost to another replica", job=job_id)
                self._foreign = True
                self._stop(self.active.pop(job_id))
        if self._foreign:
            await self.open_all()

    async def close(self) -> None:
        """Stop everything; the store keeps all."""
        entries = list(self.active.values())
        self.active.clear()
        pumps = [task for task in map(self._stop, entries) if task is not None]
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _open(self, job: Job, sources: Sources | None, *, epoch: int) -> Entry:
        spec = parse_spec(job)
        if sources is None:
            sources = await asyncio.to_thread(task_sources, spec)
        tenant, job_id = job.status.tenant, job.status.job_id
        ledger = JobLedger(
            store=self._store,
            job_id=job_id,
            tenant=tenant,
            spec=spec,
            tasks=sources.train,
            eval_tasks=sources.evals,
            payloads=RedisPayloads(self._store, JobKeys(tenant, job_id).payloads),
            hooks=self._hooks(job),
            options=self._options,
            limits=JobLimits(tenant, self._quotas),
            epoch=epoch,
            watermarks=await asyncio.to_thread(self._watermarks, job_id),
            tracer=self._tracer,
            meter=self._meter(job_id),
        )
        await ledger.open()
        return Entry(job, spec, ledger, epoch)

    async def _pump(self, ledger: JobLedger) -> None:
        """Carry the ledger's wake-ups to all lease streams."""
        while True:
            event = ledger.wakeup()
            await event.wait()
            self.wake()

    def _keep(self, job_id: str, entry: Entry) -> None:
        self._past[job_id] = entry
        while len(self._past) > _PAST:
            self._past.popitem(last=False)

    @staticmethod
    def _stop(entry: Entry) -> asyncio.Task[None] | None:
        entry.ledger.close()
        if entry.pump is not None:
            entry.pump.cancel()
        return entry.pump


def parse_spec(job: Job) -> JobSpec:
    """The spec of a record."""
    return JobSpec.model_validate_json(job.spec)


def runnable(entries: Iterable[Entry], environments: frozenset[str]) -> list[Entry]:
    """Jobs whose environment a worker can run; an empty set means all."""
    return [e for e in entries if not environments or e.spec.tasks.environment in environments]


async def sweep(entry: Entry) -> None:
    """Look after one ledger; what goes wrong with it must not stop the others."""
    try:
        await entry.ledger.sweep()
    except PacelineError as error:
        log.warning("sweep failed", job=entry.job.status.job_id, error=error)
    except Exception:  # the supervisor boundary of this job
        log.exception("sweep failed", job=entry.job.status.job_id)
