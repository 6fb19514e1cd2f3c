"""Tells Prometheus of all live jobs: what they wait for, what they hold, whether it adds up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.types import JobState, WorkerKind
from paceline.usage import TICK_S, Usage, ran
from paceline_experience.jobs import JobStore
from paceline_experience.ledgers import Entry, Ledgers
from paceline_experience.meter import JobMeter
from paceline_experience.roster import Query, Roster
from paceline_experience.store import Store

LOOK_S = 2.0  # a look at a hundred jobs holds the event loop up for 30 ms
HELD = "held"  # queued, and the controller has said why: a quota
LIVE = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING)
log = Log("watch")


class Watch:
    """One meter for each job that this process owns; they come and go with the jobs."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        usage: Usage,
        jobs: JobStore,
        ledgers: Ledgers,
        roster: Roster,
        store: Store,
        audit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._usage = usage
        self._jobs = jobs
        self._ledgers = ledgers
        self._roster = roster
        self._store = store
        self._audit_s = audit_s
        self._clock = clock
        self._meters: dict[str, JobMeter] = {}
        self._opened: set[str] = set()  # jobs whose meters tell ages
        self._seen: dict[str, int] = {}  # newest incarnation whose trainer was in the roster
        self._trainers: set[str] = set()  # jobs whose trainer is in the roster
        self._held: set[str] = set()

    def meter(self, job_id: str) -> JobMeter:
        """That of a job."""
        if job_id not in self._meters:
            self._meters[job_id] = JobMeter(self._metrics, job_id, clock=self._clock)
        return self._meters[job_id]

    async def look(self) -> None:
        """Tell what the ledgers hold; forget jobs that are over."""
        for job_id in [each for each in self._meters if not self._ledgers.live(each)]:
            self._meters.pop(job_id).close()
            self._opened.discard(job_id)
            self._seen.pop(job_id, None)
        for job_id, entry in list(self._ledgers.active.items()):
            meter = self.meter(job_id)
            if job_id not in self._opened:
                self._opened.add(job_id)
                meter.open()
                meter.bounded(entry.spec)
            meter.show(await entry.ledger.live(), entry.ledger.counts)
        await self._count()

    async def follow(self) -> None:
        """Look again and again until cancelled."""
        while True:
            try:
                await self.look()
            except PacelineError as error:
                log.warning("cannot look at jobs; their metrics stay as they were", error=error)
            await asyncio.sleep(LOOK_S)

    async def run(self) -> None:
        """Account for what jobs wait for until cancelled."""
        last = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            self.tick(ran(now - last))
            last = now

    async def audit(self) -> None:
        """Audit every live ledger in turn until cancelled."""
        while True:
            entries = list(self._ledgers.active.items())
            for job_id, entry in entries:
                try:
                    report = await entry.ledger.audit()
                except PacelineError as error:
                    log.warning("cannot audit", job=job_id, error=error)
                else:
                    if job_id in self._ledgers.active:
                        self.meter(job_id).audited(len(report.problems))
                        for problem in report.problems:
                            log.error("the ledger is wrong", job=job_id, problem=problem)
                await asyncio.sleep(self._audit_s / len(entries))
            if not entries:
                await asyncio.sleep(self._audit_s)

    def tick(self, seconds: float) -> None:
        """So much time has gone by for all live jobs."""
        trainers = self._roster.workers(Query(kind=WorkerKind.TRAINER))
        self._trainers = {worker.job_id for worker in trainers}
        for job_id, entry in self._ledgers.active.items():
            if job_id not in self._held and (on := self._awaited(job_id, entry)):
                self._metrics.add("job_seconds", seconds, job=job_id, on=on)

    def _awaited(self, job_id: str, entry: Entry) -> str:
        """Which service a job waits for; empty: it is about to stop, or paused."""
        ledger = entry.ledger
        if ledger.stopping:
            return ""
        started = job_id in self._trainers
        if started:
            self._seen[job_id] = ledger.incarnation
        if self._store.away:
            return "store"
        if on := ledger.awaited():
            return "store" if self._usage.waits("store") else on
        # Granted to a trainer that has not been seen yet: it is starting.
        starting = ledger.incarnation > self._seen.get(job_id, 0)
        return "trainer" if started or starting else "controller"

    async def _count(self) -> None:
        states = await self._jobs.states()
        mine = [(job, state) for job, _, state in states if job in self._ledgers.active]
        queued = [job for job, state in mine if state is JobState.QUEUED]
        reasons = await self._jobs.reasons(queued)
        self._held = {job for job, reason in zip(queued, reasons, strict=True) if reason}
        counts = Counter(HELD if job in self._held else str(state) for job, state in mine)
        for state in (HELD, *JobState):
            if not (isinstance(state, JobState) and state.terminal):
                self._metrics.set("jobs", counts[state], state=state)
