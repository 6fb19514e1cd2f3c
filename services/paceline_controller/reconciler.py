"""Reconciles wanted with observed workloads, pass after pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

from paceline.config.limits import LimitSettings
from paceline.config.service import ControllerOptions
from paceline.enums import TRAINER_SAYS, JobState, WorkerKind
from paceline.errors import (
    InvalidError,
    PacelineError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
)
from paceline.platform.server.failures import KILLED, OOM, describe
from paceline.platform.telemetry.logs import Log
from paceline.platform.text import clipped
from paceline_controller.collaborators import JobRegistry, Sizing
from paceline_controller.jobs.costs import Costs
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.placements import Placements
from paceline_controller.jobs.plan import LiveJob, Wanted, plan
from paceline_controller.jobs.progress import ProgressWatch
from paceline_controller.jobs.queue import Queue
from paceline_controller.jobs.slots import ProcessSlot
from paceline_controller.jobs.starting import MAX_NOTES, JobStarter
from paceline_controller.runtimes.base import Runtime
from paceline_controller.scaling.decide import Bounds

# States in which workloads end, and what follows once none is left.
TAKEN_DOWN = {JobState.CANCELLING: JobState.CANCELLED, JobState.PAUSING: JobState.PAUSED}
# Minimum pause between two passes.
MIN_PAUSE_S = 0.05
log = Log("reconciler")


class Reconciler:
    """Starts missing workloads, stops unwanted ones, restarts dead ones, and moves jobs on.

    `reason_bytes` is the length to which the ledger cuts reasons: the same cut makes an unchanged
    reason compare equal. `untracked` tells whether the trackers of some job are unfinished; without
    it the tracking process is not run here.
    """

    def __init__(
        self,
        *,
        ledger: JobRegistry,
        runtime: Runtime,
        options: ControllerOptions,
        child_grace_s: float,
        reason_bytes: int = LimitSettings().reason_bytes,
        sizing: Sizing | None = None,
        untracked: Callable[[], Awaitable[bool]] | None = None,
        costs: Costs | None = None,
        progress: ProgressWatch | None = None,
        placements: Placements | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._sizing = sizing
        self._costs = costs
        self._progress = progress
        self._runtime = runtime
        self._options = options
        self._child_grace_s = child_grace_s
        self._reason_bytes = reason_bytes
        self._clock = clock
        self._starting = JobStarter(
            ledger=ledger,
            options=options,
            reason_bytes=reason_bytes,
            placements=placements or Placements(),
        )
        self._sizes: dict[str, int] = {}
        self._jobs: dict[str, LiveJob] | None = None  # None: not asked successfully yet
        self._slots: dict[str, ProcessSlot] = {}
        self._acts: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._untracked = untracked
        self._asked = self._tracking = False
        self._said: dict[str, str] = {}  # by trainers of jobs that are under way

    def wake(self) -> None:
        """Start the next pass now, since something has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Run passes until cancelled; an error is logged, and the next pass tries again."""
        while True:
            try:
                await self.once()
            except UnavailableError as error:
                log.warning("pass skipped", error=error)
            except Exception:  # the supervisor boundary of this task
                log.exception("pass failed")
            await asyncio.sleep(min(MIN_PAUSE_S, self._options.period_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.period_s):
                    await self._changed.wait()
            self._changed.clear()

    async def once(self) -> None:
        """One pass."""
        known = await self._refresh_jobs()
        # Starts and stops that end while or after the runtime is listed are not seen in the list.
        moving = set(self._acts)
        observed = {process.name: process for process in await self._runtime.list()}
        queue = await self._start_queued(observed) if known else Queue()
        able = self._able()
        self._sizes = await self._size(able.values(), observed, queue)
        tracking = await self._tracks(able.values())
        running = [
            name for name, process in observed.items() if process.alive and not process.pending
        ]
        whole = plan(able.values(), self._options, self._sizes, tracking=tracking, running=running)
        wanted = self._units(whole.values())
        self._stop_unwanted(wanted, observed)
        moving |= self._acts.keys()
        self._keep_slots(wanted, observed, moving)
        await self._note_deaths(observed, moving)
        self._count(observed)
        await self._check_health(observed)
        self._start_missing()
        self._resize(observed)
        if known:  # otherwise a job may be in another state by now
            await self._move_jobs_on(observed)
            await self._explain()

    def _count(self, observed: dict[str, Observed]) -> None:
        if self._costs is not None and self._jobs is not None:
            wanted = {name: slot.wanted for name, slot in self._slots.items()}
            now_s = self._clock()
            self._costs.account(observed.values(), wanted, jobs=self._jobs, now_s=now_s)

    async def settle(self) -> None:
        """Wait for pending starts and stops."""
        while self._acts:
            await asyncio.wait(self._acts.values())
            await asyncio.sleep(0)

    async def halt(self) -> None:
        """Cancel pending starts and stops; the next leader resumes them."""
        acts = list(self._acts.values())
        for act in acts:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)

    async def stop_all(self) -> None:
        """Stop every process; nothing is started afterwards."""
        await self.settle()
        names = [process.name for process in await self._runtime.list()]
        stops = [self._runtime.stop(name, grace_s=self._child_grace_s) for name in names]
        await asyncio.gather(*stops)

    def _able(self) -> dict[str, LiveJob]:
        """Jobs that can run in this installation."""
        jobs = self._jobs or {}
        return {n: job for n, job in jobs.items() if not self._starting.problem(job)}

    async def _start_queued(self, observed: dict[str, Observed]) -> Queue:
        after, queue = await self._starting.once(self._able(), self._sizes, observed.values())
        self._jobs = (self._jobs or {}) | after
        return queue

    async def _size(
        self, jobs: Iterable[LiveJob], observed: dict[str, Observed], queue: Queue
    ) -> dict[str, int]:
        if self._sizing is None or self._jobs is None:
            return {}
        bounds = Bounds(self._starting.tenants, queue.claims)
        return await self._sizing.sizes(jobs, observed.values(), bounds=bounds, now_s=self._clock())

    async def _tracks(self, jobs: Iterable[LiveJob]) -> bool:
        """Whether a job has, or had, trackers: they outlive the job."""
        if self._untracked is None or self._tracking:
            return self._tracking
        self._tracking = any(job.spec.tracking for job in jobs)
        if not self._asked and self._jobs is not None:
            try:
                self._tracking = await self._untracked() or self._tracking
                self._asked = True
            except PacelineError as error:
                log.warning("cannot ask for unfinished trackers", error=error)
        return self._tracking

    def _units(self, wanted: Iterable[Wanted]) -> dict[str, Wanted]:
        return {unit.name: unit for unit in self._runtime.units(wanted)}

    async def _refresh_jobs(self) -> bool:
        """Refresh the jobs; returns whether that succeeded."""
        try:
            live = await self._ledger.live_jobs()
        except PacelineError as error:
            log.warning("cannot list jobs; going on with those known", error=error)
            return False
        self._jobs = {job.job_id: job for job in live}
        return True

    def _stop_unwanted(self, wanted: dict[str, Wanted], observed: dict[str, Observed]) -> None:
        for process in observed.values():
            unwanted = process.name not in wanted and self._jobs is not None
            if process.outdated or unwanted:
                self._act(process.name, partial(self._stop, process.name))

    def _keep_slots(
        self, wanted: dict[str, Wanted], observed: dict[str, Observed], moving: set[str]
    ) -> None:
        """Keep one slot per wanted process; running ones are adopted."""
        self._slots = {
            name: self._slots.get(name) or ProcessSlot.of(process, self._options)
            for name, process in wanted.items()
        }
        for name, process in wanted.items():
            self._slots[name].wanted = process
        for name, slot in self._slots.items():
            running = observed.get(name)
            if running and running.alive and not slot.running and name not in moving:
                slot.began(self._clock())
                log.info("adopted", process=name)
            if job := (self._jobs or {}).get(slot.wanted.job_id):
                slot.stepped(job.step)

    async def _note_deaths(self, observed: dict[str, Observed], moving: set[str]) -> None:
        alive = {name for name, process in observed.items() if process.alive}
        gone = self._slots.keys() - alive - moving
        died = {n: slot for n, slot in self._slots.items() if n in gone and slot.running}
        # Concurrently: when a machine fails, all processes on it have died.
        words = await asyncio.gather(*map(self._runtime.last_words, died))
        for (name, slot), said in zip(died.items(), words, strict=True):
            await self._end_life(slot, said)
            log.warning("process died", process=name, lives=slot.fruitless)
            if self._costs is not None:
                self._costs.restarted(slot.wanted.kind)
            await self._give_up_if_failing(slot)

    async def _check_health(self, observed: dict[str, Observed]) -> None:
        now_s = self._clock()
        for name, slot in self._slots.items():
            if name in observed and observed[name].pending:
                slot.waits(now_s)
        due = [
            slot
            for slot in self._slots.values()
            if slot.running and slot.due_for_check(now_s) and slot.wanted.name not in self._acts
        ]
        answers = await asyncio.gather(*(self._runtime.ready(s.wanted.name) for s in due))
        for slot, ready in zip(due, answers, strict=True):
            if ready and slot.ready_since_s is None:
                log.info("ready", process=slot.wanted.name)
            slot.checked(self._clock(), ready=ready)
            if slot.hangs(self._clock(), self._options.start_timeout_s):
                log.warning("does not answer; restarting", process=slot.wanted.name)
                silent = f"it did not answer for {self._options.start_timeout_s:g} s"
                await self._end_life(slot, silent)
                self._act(slot.wanted.name, partial(self._stop, slot.wanted.name))
                await self._give_up_if_failing(slot)

    def _start_missing(self) -> None:
        for name, slot in self._slots.items():
            if slot.may_start(self._clock()) and name not in self._acts:
                self._act(name, partial(self._start, slot))

    def _resize(self, observed: dict[str, Observed]) -> None:
        if self._jobs is None:
            return  # the shared pools would be scaled below the needs of unknown jobs
        for name, slot in self._slots.items():
            process, replicas = observed.get(name), slot.wanted.replicas
            if (
                process
                and process.alive
                and process.replicas != replicas
                and name not in self._acts
            ):
                log.info("scales", process=name, replicas=replicas, before=process.replicas)
                self._act(name, partial(self._runtime.scale, name, replicas))

    async def _move_jobs_on(self, observed: dict[str, Observed]) -> None:
        for job in (self._jobs or {}).values():
            if job.state is JobState.QUEUED and (reason := self._starting.problem(job)):
                await self._set_state(job.job_id, JobState.FAILED, reason=reason)
            elif job.state in TAKEN_DOWN and not self._has_any(job, observed):
                reason = job.reason if job.state is JobState.PAUSING else ""
                await self._set_state(job.job_id, TAKEN_DOWN[job.state], reason=reason)

    async def _explain(self) -> None:
        """Set the reason of started jobs to what keeps their workloads from running.

        That is what the runtime waits for, how a process of the job failed, or who keeps it from
        getting on. Once nothing does, the trainer's own reason is restored.
        """
        if self._progress is not None:
            await self._progress.look((self._jobs or {}).values())
        under_way = (JobState.STARTING, JobState.RUNNING)
        started = {n: job for n, job in (self._jobs or {}).items() if job.state in under_way}
        said = {n: j.reason for n, j in started.items() if j.reason.startswith(TRAINER_SAYS)}
        self._said = {n: words for n, words in (self._said | said).items() if n in started}
        reasons = {n: self._reason_of(n) for n in started}
        changed = [job for n, job in started.items() if job.reason != reasons[n]]
        for job in changed[:MAX_NOTES]:
            await self._set_state(job.job_id, job.state, reason=reasons[job.job_id])

    def _reason_of(self, job_id: str) -> str:
        own = (slot for slot in self._slots.values() if slot.wanted.job_id == job_id)
        failures = next((slot.failures() for slot in own if slot.in_trouble), "")
        stuck = "" if self._progress is None else self._progress.reason(job_id)
        reason = self._runtime.waits_for(job_id) or failures or stuck or self._said.get(job_id, "")
        return clipped(reason, self._reason_bytes)

    def _has_any(self, job: LiveJob, observed: dict[str, Observed]) -> bool:
        """Whether any workload of the job runs, starts or stops."""
        acting = any(job.job_id in name for name in self._acts)
        return acting or any(process.job_id == job.job_id for process in observed.values())

    async def _end_life(self, slot: ProcessSlot, words: str) -> None:
        """Record a failure; those of trainers are also counted in the ledger."""
        slot.ended(self._clock())
        slot.words = words
        if words.startswith(OOM):
            log.error("out of memory", process=slot.wanted.name, words=words)
        if slot.wanted.kind is WorkerKind.TRAINER:
            try:
                lives, recorded = await self._ledger.report_failure(slot.wanted.job_id, words)
            except PacelineError as error:
                log.warning("cannot keep a failure", process=slot.wanted.name, error=error)
                return
            slot.fruitless = max(slot.fruitless, lives)
            end = words.partition("\n")[0]
            # A killed rank reports nothing; the other ranks report that it has left.
            killed = end.startswith((OOM, KILLED)) and end not in recorded
            slot.words = f"{end}; {recorded}" if killed else recorded

    async def _give_up_if_failing(self, slot: ProcessSlot) -> None:
        alone = not any(
            other.ready_since_s is not None
            for other in self._slots.values()
            if (other.wanted.job_id, other.wanted.kind) == (slot.wanted.job_id, slot.wanted.kind)
        )
        if slot.quarantine(self._clock(), alone=alone):
            log.error("quarantined", process=slot.wanted.name, words=slot.words)
            return
        if slot.fruitless < slot.most_failures(self._options, alone=alone):
            return
        name, lives, words = slot.wanted.name, slot.fruitless, slot.words
        if slot.wanted.kind is WorkerKind.TRACKING:
            slot.fruitless = 0
            log.error("the tracking process keeps failing", process=name, lives=lives, words=words)
            return  # no job depends on it
        if job_id := slot.wanted.job_id:
            if await self._give_up(job_id, name, slot.failures()):
                slot.fruitless = 0
            return
        slot.fruitless = 0
        # The output of a shared pool may quote jobs of any tenant: only operators may see it.
        log.error("a shared pool does not run", process=name, lives=lives, words=words)
        reason = f"the shared pool {name} does not run: it failed {lives} times; see its log"
        for job in list((self._jobs or {}).values()):
            if job.state is not JobState.QUEUED:  # the pool may have recovered when it starts
                await self._give_up(job.job_id, name, reason)

    async def _give_up(self, job_id: str, name: str, reason: str) -> bool:
        log.error("gives up", job=job_id, process=name)
        return await self._set_state(job_id, JobState.FAILED, reason=reason)

    async def _set_state(self, job_id: str, state: JobState, *, reason: str = "") -> bool:
        """Set a job's state; returns whether that succeeded."""
        try:
            await self._ledger.set_state(job_id, state, reason=reason)
        except PacelineError as error:
            log.warning("cannot move the job on", job=job_id, state=state, error=error)
            return False
        return True

    async def _start(self, slot: ProcessSlot) -> None:
        wanted, incarnation = slot.wanted, 0
        try:
            if wanted.kind is WorkerKind.TRAINER:
                incarnation = await self._ledger.grant_incarnation(wanted.job_id)
            await self._runtime.start(wanted, incarnation=incarnation)
        except StateError as error:
            log.info("not started", process=wanted.name, error=error)
        except (InvalidError, PermissionDeniedError, OSError) as error:
            # A retry is unlikely to succeed: it counts as a failure.
            log.exception("cannot start", process=wanted.name)
            await self._end_life(slot, describe(error))
            if isinstance(error, InvalidError) and wanted.job_id and not slot.best_step:
                # A retry would be refused too, and a job without steps has nothing to lose.
                reason = f"{wanted.name} cannot be started: {error.message}"
                await self._give_up(wanted.job_id, wanted.name, reason)
                return
            await self._give_up_if_failing(slot)
        except PacelineError as error:
            log.warning("cannot start", process=wanted.name, error=error)
        else:
            slot.began(self._clock())

    async def _stop(self, name: str) -> None:
        await self._runtime.stop(name, grace_s=self._child_grace_s)
        if slot := self._slots.get(name):
            slot.running = False

    def _act(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start a background action on a process, unless another one is pending."""
        if name in self._acts:
            return
        task = asyncio.create_task(_run_logged(name, work), name=f"act {name}")
        self._acts[name] = task
        task.add_done_callback(lambda _: self._acts.pop(name, None))


async def _run_logged(name: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception:  # the supervisor boundary of this task
        log.exception("action failed", process=name)
