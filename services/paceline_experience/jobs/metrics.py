"""Metrics of all live jobs: what they wait for, what their ledgers hold, whether it adds up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from paceline.enums import JobState, WorkerKind
from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.usage import TICK_S, Usage, ran
from paceline_experience.fleet.roster import Query, Roster
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers, OpenLedger
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.store.store import Store

COLLECT_S = 2.0  # collecting a hundred jobs blocks the event loop for 30 ms
HELD = "held"  # queued, with a reason from the controller: a quota
LIVE = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING)
log = Log("watch")


class JobMetricsCollector:
    """One meter per job that this process owns, from its activation to its end."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        usage: Usage,
        jobs: JobStore,
        ledgers: Ledgers,
        roster: Roster,
        store: Store,
        verify_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._usage = usage
        self._jobs = jobs
        self._ledgers = ledgers
        self._roster = roster
        self._store = store
        self._verify_interval_s = verify_interval_s
        self._clock = clock
        self._meters: dict[str, JobMeter] = {}
        self._opened: set[str] = set()  # jobs whose meters report ages
        self._seen: dict[str, int] = {}  # newest incarnation whose trainer was in the roster
        self._trainers: set[str] = set()  # jobs whose trainer is in the roster
        self._held: set[str] = set()
        self._waits: defaultdict[str, defaultdict[str, float]]  # by job, in seconds
        self._waits = defaultdict(lambda: defaultdict(float))

    def meter(self, job_id: str) -> JobMeter:
        """The meter of a job."""
        if job_id not in self._meters:
            self._meters[job_id] = JobMeter(self._metrics, job_id, clock=self._clock)
        return self._meters[job_id]

    async def collect(self) -> None:
        """Set the gauges of all ledgers; remove those of jobs that are over."""
        for job_id in [each for each in self._meters if not self._ledgers.live(each)]:
            self._meters.pop(job_id).close()
            self._opened.discard(job_id)
            self._seen.pop(job_id, None)
            self._waits.pop(job_id, None)
        for job_id, entry in list(self._ledgers.active.items()):
            meter = self.meter(job_id)
            if job_id not in self._opened:
                self._opened.add(job_id)
                meter.open()
                meter.bounded(entry.spec)
            meter.show(await entry.ledger.live(), entry.ledger.counts)
        await self._count()

    async def run_collect(self) -> None:
        """Collect every two seconds until cancelled."""
        while True:
            try:
                await self.collect()
            except PacelineError as error:
                log.warning("cannot collect metrics of jobs; they stay as they were", error=error)
            await asyncio.sleep(COLLECT_S)

    async def run_waits(self) -> None:
        """Account for what jobs wait for, until cancelled."""
        last = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            self.tick(ran(now - last))
            last = now

    async def run_verify(self) -> None:
        """Verify every live ledger in turn, until cancelled."""
        while True:
            entries = list(self._ledgers.active.items())
            for job_id, entry in entries:
                try:
                    report = await entry.ledger.verify()
                except PacelineError as error:
                    log.warning("cannot verify", job=job_id, error=error)
                else:
                    if job_id in self._ledgers.active:
                        self.meter(job_id).verified(len(report.problems))
                        for problem in report.problems:
                            log.error("the ledger is wrong", job=job_id, problem=problem)
                await asyncio.sleep(self._verify_interval_s / len(entries))
            if not entries:
                await asyncio.sleep(self._verify_interval_s)

    def tick(self, seconds: float) -> None:
        """Add `seconds` to the waits of all live jobs."""
        trainers = self._roster.workers(Query(kind=WorkerKind.TRAINER))
        self._trainers = {worker.job_id for worker in trainers}
        for job_id, entry in self._ledgers.active.items():
            if job_id not in self._held and (on := self._waiting_on(job_id, entry)):
                self._metrics.add("job_wait_seconds", seconds, job=job_id, waiting_on=on)
                self._waits[job_id][on] += seconds

    def waits_s(self, job_id: str) -> dict[str, float]:
        """What a live job has waited for so far, in seconds by service, as the metric counts it."""
        return dict(self._waits.get(job_id, {}))

    def held(self, job_id: str) -> bool:
        """Whether the controller says that a job has to wait."""
        return job_id in self._held

    def _waiting_on(self, job_id: str, entry: OpenLedger) -> str:
        """Which service a job waits for; empty: it is about to stop, or paused."""
        ledger = entry.ledger
        if ledger.stopping:
            return ""
        started = job_id in self._trainers
        if started:
            self._seen[job_id] = ledger.incarnation
        if self._store.unreachable:
            return "store"
        if on := ledger.waiting_on():
            return "store" if self._usage.waits("store") else on
        # An incarnation that was granted but never in the roster is starting.
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
