"""The ledgers of all live jobs in this process, and recently read ones of past jobs."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

from paceline.config import JobSpec, job_of
from paceline.config.service import ExperienceOptions
from paceline.data import MissingDataError, UnreadError
from paceline.enums import JobState
from paceline.errors import (
    DeadlineError,
    FencedError,
    NotFoundError,
    PacelineError,
    StateError,
    UnavailableError,
)
from paceline.platform.telemetry.logs import Log
from paceline.types import Job
from paceline_experience.jobs.dry_run import UntriedError
from paceline_experience.jobs.history import History
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.opening.job_code import JobCode
from paceline_experience.jobs.opening.opener import LedgerOpener
from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.ledger.own.parts import NO_PARTS
from paceline_experience.ledger.sources import NoTasks, Sources
from paceline_experience.store.signal import Signal
from paceline_experience.store.store import Store
from paceline_experience.store.watermarks import Watermarks

log = Log("ledgers")
_MAX_PAST = 8
# Errors that are no fault of the job: its ledger is opened later.
_TRANSIENT = (
    UnavailableError,
    DeadlineError,
    UntriedError,
    UnreadError,
    MissingDataError,  # of a volume that comes back
    OSError,
)
RETRY_S = 60.0  # until a job that could not be opened is tried again
_MAX_UNTRIED = 3


class UnopenableError(StateError):
    """The ledger of a job cannot be opened; a live job fails with this reason."""


class OverError(StateError):
    """The job is over: its ledger can only be read."""


class NotOpenError(UnavailableError):
    """The ledger of a job could not be opened yet; it will be retried."""


@dataclass(slots=True)
class OpenLedger:
    """An open ledger; `epoch` is that of the ownership under which it was opened."""

    job: Job
    spec: JobSpec
    ledger: JobLedger
    epoch: int = 0
    pump: asyncio.Task[None] | None = None


class Ledgers:
    """Opens, finds and retires ledgers. A job is owned by the replica that holds its lease."""

    def __init__(
        self,
        *,
        store: Store,
        jobs: JobStore,
        history: History,
        opener: LedgerOpener,
        code: JobCode,
        opened: Callable[[Job, JobLedger], Awaitable[None]],
        watermarks: Callable[[str], Watermarks],
        options: ExperienceOptions,
        owner: str,
        retry_s: float = RETRY_S,
    ) -> None:
        """`opened` is called with each ledger; `watermarks` returns those of a job, by its id."""
        self.active: dict[str, OpenLedger] = {}
        self.listeners: set[Signal] = set()
        self._store = store
        self._jobs = jobs
        self._history = history
        self._opener = opener
        self._code = code
        self._opened = opened
        self._watermarks = watermarks
        self._options = options
        self._owner = owner
        self._retry_s = retry_s
        self._incomplete = False  # some live job is not active here
        self._past: OrderedDict[str, OpenLedger] = OrderedDict()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._activating: set[str] = set()  # jobs that are about to become active
        self._retry_at: dict[str, tuple[float, str]] = {}  # when to retry, and the last error
        self._untried: Counter[str] = Counter()

    async def open_missing(self) -> None:
        """Open ledgers whose opening was deferred, or that another replica may have released."""
        if self._incomplete:
            await self.open_all()

    async def open_all(self) -> None:
        """Take every live job that no other replica owns; each fails on its own."""
        self._incomplete = False
        with self.looked_for():  # some were not reached
            for job in await self._jobs.live():
                await self.take(job.status.job_id)

    @contextmanager
    def looked_for(self) -> Generator[None]:
        """If this fails, there may be a live job that is not open: a sweep looks for it."""
        try:
            yield
        except BaseException:
            self._incomplete = True
            raise

    async def take(self, job_id: str) -> None:
        """Open the ledger of a live job: now, or with a sweep if that cannot be now."""
        if job_id in self.active:
            return
        with self.looked_for(), suppress(UnopenableError, OverError, NotFoundError):
            try:
                await self.activate(await self._jobs.get(job_id))
            except (FencedError, NotOpenError) as error:
                self._incomplete = True
                log.info("not open here yet", job=job_id, error=error)

    async def activate(self, job: Job, sources: Sources | None = None) -> JobLedger:
        """Take ownership of a job and open its ledger.

        Raises:
            FencedError: another replica owns it.
            NotOpenError: it cannot be opened for now, through no fault of the job.
            UnopenableError: it cannot be opened, so the job has failed.
            OverError: the job has ended meanwhile.
        """
        job_id = job.status.job_id
        async with self._lock(job_id):
            found = self.active.get(job_id)
            if found is not None:
                return found.ledger
            await self._check_not_over(job_id)
            self._check_backoff(job_id)
            lease_s = self._options.member_lease_s
            epoch = await self._jobs.claim(job, self._owner, lease_s=lease_s)
            if epoch == 0:
                raise FencedError(f"job {job_id} is owned by another replica")
            self._activating.add(job_id)
            try:
                entry = await self._start(job, sources, epoch=epoch)
            except FencedError:
                raise
            except _TRANSIENT as error:
                if self._store.unreachable:
                    raise
                raise await self._defer(job, error) from error
            except Exception as error:  # the supervisor boundary of this job
                if not isinstance(error, PacelineError):
                    log.exception("cannot be opened", job=job_id)
                raise await self._give_up(job, error) from error
            finally:
                self._activating.discard(job_id)
            self.active[job_id] = entry
            self.forget(job_id)
        self.wake()
        return entry.ledger

    def live(self, job_id: str) -> bool:
        """Whether a job is active here, or about to be."""
        return job_id in self.active or job_id in self._activating

    async def get(self, job_id: str) -> JobLedger:
        """The ledger of any job.

        Raises:
            NotFoundError: no job has this id.
            NotOpenError: it cannot be opened for now, through no fault of the job.
            UnopenableError: it cannot be opened.
        """
        found = self.peek(job_id)
        if found is not None:
            return found
        job = await self._jobs.get(job_id)
        if not job.status.state.terminal and not self._options.read_only:
            with suppress(OverError):
                return await self.activate(job)
        async with self._lock(job_id):
            entry = self._past.get(job_id)
            if entry is None:
                try:
                    entry = await self._read(job)
                except (UnavailableError, DeadlineError):
                    raise
                except Exception as error:  # the supervisor boundary of this job
                    if not isinstance(error, PacelineError):
                        log.exception("cannot be read", job=job_id)
                    raise UnopenableError(f"job {job_id} cannot be read: {_text(error)}") from error
            self._cache(job_id, entry)
            return entry.ledger

    async def find(self, job_id: str) -> JobLedger | None:
        """The ledger of any job; None where it cannot be opened, now or ever.

        Raises:
            NotFoundError: no job has this id.
        """
        try:
            return await self.get(job_id)
        except (NotOpenError, UnopenableError) as error:
            log.warning("the ledger is not open; going on without it", job=job_id, error=error)
            return None

    def peek(self, job_id: str) -> JobLedger | None:
        """The ledger of a job if it is open."""
        entry = self.active.get(job_id) or self._past.get(job_id)
        return entry.ledger if entry else None

    def retire(self, job_id: str) -> None:
        """The job is over: nothing is leased from its ledger, and it is not swept any more."""
        entry = self.active.pop(job_id, None)
        if entry is not None:
            self._stop(entry, over=True)
            self._cache(job_id, entry)
        self.forget(job_id)

    async def discard(self, job_id: str) -> None:
        """The job is about to be deleted."""
        async with self._lock(job_id):
            self.retire(job_id)
            self._past.pop(job_id, None)

    def forget(self, job_id: str) -> None:
        """Forget failed attempts to open it: it is open or over."""
        self._retry_at.pop(job_id, None)
        self._untried.pop(job_id, None)

    @contextmanager
    def isolate(self, what: str, job_id: str) -> Generator[None]:
        """Log errors of one job's ledger instead of raising them, so that others go on.

        Errors of an unreachable store are raised: they concern all jobs.
        """
        try:
            yield
        except PacelineError as error:
            if self._store.unreachable:
                raise
            log.warning(what, job=job_id, error=error)
        except Exception:  # the supervisor boundary of this job
            log.exception(what, job=job_id)

    def wake(self) -> None:
        """Wake the lease streams: there may be episodes to lease."""
        for signal in self.listeners:
            signal.fire()

    async def renew(self) -> None:
        """Renew ownership; release jobs that another replica has taken."""
        for job_id, entry in list(self.active.items()):
            epoch = await self._jobs.claim(
                entry.job, self._owner, lease_s=self._options.member_lease_s, epoch=entry.epoch
            )
            if epoch == 0 and self.active.get(job_id) is entry:
                log.warning("taken over by another replica", job=job_id)
                self._incomplete = True
                self._stop(self.active.pop(job_id))

    async def close(self) -> None:
        """Close all ledgers; their state is in the store."""
        entries = list(self.active.values())
        self.active.clear()
        pumps = [task for task in map(self._stop, entries) if task is not None]
        await asyncio.gather(*pumps, return_exceptions=True)

    def _lock(self, job_id: str) -> asyncio.Lock:
        """A lock per job, so that one that is slow to open does not block others."""
        return self._opening.setdefault(job_id, asyncio.Lock())

    async def _check_not_over(self, job_id: str) -> None:
        """The caller's record may be outdated; the state is final before the ledger is retired."""
        state = (await self._jobs.get(job_id)).status.state
        if state.terminal:
            raise OverError(f"job {job_id} is over: {state}")

    def _check_backoff(self, job_id: str) -> None:
        when, why = self._retry_at.get(job_id, (0.0, ""))
        if asyncio.get_running_loop().time() < when:
            raise NotOpenError(why)

    async def _defer(self, job: Job, error: Exception) -> PacelineError:
        job_id = job.status.job_id
        if isinstance(error, (UntriedError, UnreadError)):
            self._untried[job_id] += 1
            if self._untried[job_id] >= _MAX_UNTRIED:
                return await self._give_up(job, error)
        why = f"job {job_id} is not open, will be retried: {_text(error)}"
        log.error("cannot be opened yet", job=job_id, error=error, retry_s=self._retry_s)
        self._retry_at[job_id] = (asyncio.get_running_loop().time() + self._retry_s, why)
        return NotOpenError(why)

    async def _give_up(self, job: Job, error: Exception) -> UnopenableError:
        """End the job: cancelled if it was being cancelled, otherwise failed."""
        job_id, reason = job.status.job_id, f"cannot be opened: {_text(error)}"
        log.error("over", job=job_id, reason=reason)
        cancelling = (await self._jobs.get(job_id)).status.state is JobState.CANCELLING
        state = JobState.CANCELLED if cancelling else JobState.FAILED
        await self._jobs.transition(job_id, state, reason=reason)
        self.forget(job_id)
        self._history.changed(job_id).fire()
        return UnopenableError(f"job {job_id} {reason}")

    async def _start(self, job: Job, sources: Sources | None, *, epoch: int) -> OpenLedger:
        job_id, parts = job.status.job_id, JobParts(job_of(job))
        if sources is None:
            sources = await self._code.sources(parts)
        own = await self._code.functions(job_id, parts, sources)
        try:
            marks = await asyncio.to_thread(self._watermarks, job_id)
            ledger = await self._opener.open(
                job, parts, sources, epoch=epoch, watermarks=marks, own=own
            )
            await ledger.record()
            await self._opened(job, ledger)
        except BaseException:
            self._code.end(job_id)
            raise
        pump = asyncio.create_task(self._pump(ledger), name="pump")
        return OpenLedger(job, parts.spec, ledger, epoch, pump)

    async def _read(self, job: Job) -> OpenLedger:
        """The ledger of a job, for reading: nothing of the job is called.

        It must not write either: the job may be deleted at this moment.
        """
        epoch, parts = await self._jobs.epoch(job), JobParts(job_of(job))
        ledger = await self._opener.open(
            job, parts, Sources(NoTasks()), epoch=epoch, watermarks=Watermarks(), own=NO_PARTS
        )
        return OpenLedger(job, parts.spec, ledger, epoch)

    async def _pump(self, ledger: JobLedger) -> None:
        """Carry the ledger's wake-ups to all lease streams."""
        while True:
            event = ledger.wakeup()
            await event.wait()
            self.wake()

    def _cache(self, job_id: str, entry: OpenLedger) -> None:
        self._past[job_id] = entry
        while len(self._past) > _MAX_PAST:
            self._past.popitem(last=False)

    def _stop(self, entry: OpenLedger, *, over: bool = False) -> asyncio.Task[None] | None:
        self._history.forget(entry.job.status.job_id)
        entry.ledger.close(over=over)
        self._code.end(entry.job.status.job_id)
        if entry.pump is not None:
            entry.pump.cancel()
        return entry.pump


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"


async def sweep(entry: OpenLedger) -> None:
    """Sweep one ledger; its errors must not stop the others."""
    try:
        await entry.ledger.sweep()
    except PacelineError as error:
        log.warning("sweep failed", job=entry.job.status.job_id, error=error)
    except Exception:  # the supervisor boundary of this job
        log.exception("sweep failed", job=entry.job.status.job_id)
