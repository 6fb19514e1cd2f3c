"""Wanted against observed: one pass after another until both agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

from paceline.config.limits import LimitSettings
from paceline.config.service import ControllerOptions
from paceline.errors import (
    InvalidError,
    PacelineError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
)
from paceline.failures import KILLED, OOM, describe
from paceline.logs import Log
from paceline.tenants import Tenant
from paceline.text import clipped
from paceline.types import TRAINER_SAYS, JobState, WorkerKind
from paceline_controller.costs import Costs
from paceline_controller.plan import LiveJob, Wanted, plan, problem
from paceline_controller.queue import Queue
from paceline_controller.runtimes.base import Observed, Runtime
from paceline_controller.scaling.decide import Bounds
from paceline_controller.slots import Slot
from paceline_controller.starting import MOST_NOTES, Starting, replicas_there

# Between two passes, however much changes.
LEAST_PAUSE_S = 0.05
log = Log("reconciler")


class Ledger(Protocol):
    """What the reconciler asks of the experience service."""

    async def live_jobs(self) -> list[LiveJob]:
        """All jobs that are not over."""
        ...

    async def grant_incarnation(self, job_id: str) -> int:
        """The number of the next start of a trainer."""
        ...

    async def report_failure(self, job_id: str, reason: str) -> tuple[int, str]:
        """The newest life of a trainer has ended badly: how many have without progress, and why."""
        ...

    async def set_state(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        """Move a job on, or tell it why it waits."""
        ...

    async def tenants(self) -> Mapping[str, Tenant]:
        """What each tenant may use, and uses."""
        ...


class Sizing(Protocol):
    """Who says how many replicas there are of what is scaled."""

    async def sizes(
        self,
        jobs: Iterable[LiveJob],
        observed: Iterable[Observed],
        *,
        bounds: Bounds,
        now_s: float,
    ) -> dict[str, int]:
        """Replicas by workload, within bounds."""
        ...


class Reconciler:
    """Starts what is missing, stops what is not wanted, restarts what died, moves jobs on.

    `reason_bytes` is what the ledger keeps of a reason: one that it cuts off is not new each time.
    `untracked` says whether a job has trackers that lack some of it; the tracking process is not
    run here without it.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        runtime: Runtime,
        options: ControllerOptions,
        child_grace_s: float,
        reason_bytes: int = LimitSettings().reason_bytes,
        sizing: Sizing | None = None,
        untracked: Callable[[], Awaitable[bool]] | None = None,
        costs: Costs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._sizing = sizing
        self._costs = costs
        self._runtime = runtime
        self._options = options
        self._child_grace_s = child_grace_s
        self._reason_bytes = reason_bytes
        self._clock = clock
        self._starting = Starting(ledger=ledger, options=options, reason_bytes=reason_bytes)
        self._sizes: dict[str, int] = {}
        self._jobs: dict[str, LiveJob] | None = None  # None: not asked successfully yet
        self._slots: dict[str, Slot] = {}
        self._acts: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._untracked = untracked
        self._asked = self._tracking = False
        self._said: dict[str, str] = {}  # by trainers of jobs that are under way

    def wake(self) -> None:
        """Something has changed: do not wait for the end of the period."""
        self._changed.set()

    async def run(self) -> None:
        """Pass after pass; what goes wrong in one is logged and met again in the next."""
        while True:
            try:
                await self.once()
            except UnavailableError as error:
                log.warning("pass put off", error=error)
            except Exception:  # the supervisor boundary of this task
                log.exception("pass failed")
            await asyncio.sleep(min(LEAST_PAUSE_S, self._options.period_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.period_s):
                    await self._changed.wait()
            self._changed.clear()

    async def once(self) -> None:
        """One pass."""
        known = await self._look_at_jobs()
        # Starts and stops that end while or after the runtime is listed are not seen in the list.
        moving = set(self._acts)
        observed = {found.name: found for found in await self._runtime.list()}
        queue = await self._start_queued(observed) if known else Queue()
        able = self._able()
        self._sizes = await self._size(able.values(), observed, queue)
        tracking = await self._tracks(able.values())
        whole = plan(able.values(), self._options, self._sizes, tracking=tracking)
        wanted = self._units(whole.values())
        self._stop_unwanted(wanted, observed)
        moving |= self._acts.keys()
        self._keep_slots(wanted, observed, moving)
        await self._note_deaths(observed, moving)
        self._count(observed)
        await self._check_health(observed)
        self._start_missing()
        self._resize(observed)
        await self._move_jobs_on(observed)
        await self._explain()

    def _count(self, observed: dict[str, Observed]) -> None:
        if self._costs is not None and self._jobs is not None:
            wanted = {name: slot.wanted for name, slot in self._slots.items()}
            now_s = self._clock()
            self._costs.look(observed.values(), wanted, jobs=self._jobs, now_s=now_s)

    async def settle(self) -> None:
        """Wait for the starts and stops that are under way."""
        while self._acts:
            await asyncio.wait(self._acts.values())
            await asyncio.sleep(0)

    async def halt(self) -> None:
        """Break off the starts and stops that are under way; whoever comes next takes them up."""
        acts = list(self._acts.values())
        for act in acts:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)

    async def stop_all(self) -> None:
        """Stop every process; nothing is started afterwards."""
        await self.settle()
        names = [found.name for found in await self._runtime.list()]
        stops = [self._runtime.stop(name, grace_s=self._child_grace_s) for name in names]
        await asyncio.gather(*stops)

    def _able(self) -> dict[str, LiveJob]:
        """Jobs that can run here."""
        jobs = self._jobs or {}
        return {n: job for n, job in jobs.items() if not problem(job, self._options)}

    async def _start_queued(self, observed: dict[str, Observed]) -> Queue:
        there = replicas_there(observed.values())
        after, queue = await self._starting.once(self._able(), self._sizes, there)
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
        """A job with trackers is or was here: they go on when it is over."""
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

    async def _look_at_jobs(self) -> bool:
        """Whether the jobs are those of this moment."""
        try:
            found = await self._ledger.live_jobs()
        except PacelineError as error:
            log.warning("cannot list jobs; going on with those known", error=error)
            return False
        self._jobs = {job.job_id: job for job in found}
        return True

    def _stop_unwanted(self, wanted: dict[str, Wanted], observed: dict[str, Observed]) -> None:
        for found in observed.values():
            unwanted = found.name not in wanted and self._jobs is not None
            if found.outdated or unwanted:
                self._act(found.name, partial(self._stop, found.name))

    def _keep_slots(
        self, wanted: dict[str, Wanted], observed: dict[str, Observed], moving: set[str]
    ) -> None:
        """One slot for each wanted process; what already runs is adopted."""
        self._slots = {
            name: self._slots.get(name) or Slot.of(process, self._options)
            for name, process in wanted.items()
        }
        for name, process in wanted.items():
            self._slots[name].wanted = process
        for name, slot in self._slots.items():
            found = observed.get(name)
            if found and found.alive and not slot.running and name not in moving:
                slot.began(self._clock())
                log.info("adopted", process=name)
            if job := (self._jobs or {}).get(slot.wanted.job_id):
                slot.stepped(job.step)

    async def _note_deaths(self, observed: dict[str, Observed], moving: set[str]) -> None:
        alive = {name for name, found in observed.items() if found.alive}
        gone = self._slots.keys() - alive - moving
        died = {n: slot for n, slot in self._slots.items() if n in gone and slot.running}
        # Together: when a machine goes, all that ran on it has died.
        words = await asyncio.gather(*map(self._runtime.last_words, died))
        for (name, slot), said in zip(died.items(), words, strict=True):
            await self._end_life(slot, said)
            log.warning("process died", process=name, lives=slot.fruitless)
            if self._costs is not None:
                self._costs.restarted(slot.wanted.kind)
            await self._give_up_if_hopeless(slot)

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
                await self._give_up_if_hopeless(slot)

    def _start_missing(self) -> None:
        for name, slot in self._slots.items():
            if slot.may_start(self._clock()) and name not in self._acts:
                self._act(name, partial(self._start, slot))

    def _resize(self, observed: dict[str, Observed]) -> None:
        if self._jobs is None:
            return  # the shared pools would lose what unknown jobs need of them
        for name, slot in self._slots.items():
            found, replicas = observed.get(name), slot.wanted.replicas
            if found and found.alive and found.replicas != replicas and name not in self._acts:
                log.info("scales", process=name, replicas=replicas, before=found.replicas)
                self._act(name, partial(self._runtime.scale, name, replicas))

    async def _move_jobs_on(self, observed: dict[str, Observed]) -> None:
        for job in (self._jobs or {}).values():
            if job.state is JobState.QUEUED and (reason := problem(job, self._options)):
                await self._set_state(job.job_id, JobState.FAILED, reason=reason)
            elif job.state is JobState.CANCELLING and not self._has_any(job, observed):
                await self._set_state(job.job_id, JobState.CANCELLED)

    async def _explain(self) -> None:
        """Jobs that are under way hear what keeps their workloads from running.

        Once nothing does, what the trainer has said stands there again.
        """
        under_way = (JobState.STARTING, JobState.RUNNING)
        found = {n: job for n, job in (self._jobs or {}).items() if job.state in under_way}
        said = {n: j.reason for n, j in found.items() if j.reason.startswith(TRAINER_SAYS)}
        self._said = {n: words for n, words in (self._said | said).items() if n in found}
        reasons = {n: self._reason_of(n) for n in found}
        changed = [job for n, job in found.items() if job.reason != reasons[n]]
        for job in changed[:MOST_NOTES]:
            await self._set_state(job.job_id, job.state, reason=reasons[job.job_id])

    def _reason_of(self, job_id: str) -> str:
        reason = self._runtime.waits_for(job_id) or self._said.get(job_id, "")
        return clipped(reason, self._reason_bytes)

    def _has_any(self, job: LiveJob, observed: dict[str, Observed]) -> bool:
        """Something of the job runs, starts or stops."""
        acting = any(job.job_id in name for name in self._acts)
        return acting or any(found.job_id == job.job_id for found in observed.values())

    async def _end_life(self, slot: Slot, words: str) -> None:
        """It ended badly; of a trainer the ledger keeps how often, and what it has said itself."""
        slot.ended(self._clock())
        slot.words = words
        if words.startswith(OOM):
            log.error("out of memory", process=slot.wanted.name, words=words)
        if slot.wanted.kind is WorkerKind.TRAINER:
            try:
                lives, told = await self._ledger.report_failure(slot.wanted.job_id, words)
            except PacelineError as error:
                log.warning("cannot keep a failure", process=slot.wanted.name, error=error)
                return
            slot.fruitless = max(slot.fruitless, lives)
            end = words.partition("\n")[0]
            # A rank that is killed says nothing; the others say that it has left them.
            killed = end.startswith((OOM, KILLED)) and end not in told
            slot.words = f"{end}; {told}" if killed else told

    async def _give_up_if_hopeless(self, slot: Slot) -> None:
        if slot.fruitless < self._options.give_up_after:
            return
        name, lives, words = slot.wanted.name, slot.fruitless, slot.words
        if slot.wanted.kind is WorkerKind.TRACKING:
            slot.fruitless = 0
            log.error("trackers get nothing", process=name, lives=lives, words=words)
            return  # no job waits for it
        if job_id := slot.wanted.job_id:
            reason = f"{name} failed {lives} times without progress: {words}"
            if await self._give_up(job_id, name, reason):
                slot.fruitless = 0
            return
        slot.fruitless = 0
        # What a shared pool says last may quote any tenant's job: only the operator reads it.
        log.error("a shared pool does not run", process=name, lives=lives, words=words)
        reason = f"the shared pool {name} does not run: it failed {lives} times; see its log"
        for job in list((self._jobs or {}).values()):
            if job.state is not JobState.QUEUED:  # the pool may be back when its turn comes
                await self._give_up(job.job_id, name, reason)

    async def _give_up(self, job_id: str, name: str, reason: str) -> bool:
        log.error("gives up", job=job_id, process=name)
        return await self._set_state(job_id, JobState.FAILED, reason=reason)

    async def _set_state(self, job_id: str, state: JobState, *, reason: str = "") -> bool:
        """Whether it is done."""
        try:
            await self._ledger.set_state(job_id, state, reason=reason)
        except PacelineError as error:
            log.warning("cannot move the job on", job=job_id, state=state, error=error)
            return False
        return True

    async def _start(self, slot: Slot) -> None:
        wanted, incarnation = slot.wanted, 0
        try:
            if wanted.kind is WorkerKind.TRAINER:
                incarnation = await self._ledger.grant_incarnation(wanted.job_id)
            await self._runtime.start(wanted, incarnation=incarnation)
        except StateError as error:
            log.info("not started", process=wanted.name, error=error)
        except (InvalidError, PermissionDeniedError, OSError) as error:
            # The next attempt is unlikely to fare better: it counts as a life.
            log.exception("cannot start", process=wanted.name)
            await self._end_life(slot, describe(error))
            if isinstance(error, InvalidError) and wanted.job_id and not slot.best_step:
                # The same would be refused again, and a job without steps has nothing to lose.
                reason = f"{wanted.name} cannot be started: {error.message}"
                await self._give_up(wanted.job_id, wanted.name, reason)
                return
            await self._give_up_if_hopeless(slot)
        except PacelineError as error:
            log.warning("cannot start", process=wanted.name, error=error)
        else:
            slot.began(self._clock())

    async def _stop(self, name: str) -> None:
        await self._runtime.stop(name, grace_s=self._child_grace_s)
        if slot := self._slots.get(name):
            slot.running = False

    def _act(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do one thing at a time with a process, beside the passes."""
        if name in self._acts:
            return
        task = asyncio.create_task(_guarded(name, work), name=f"act {name}")
        self._acts[name] = task
        task.add_done_callback(lambda _: self._acts.pop(name, None))


async def _guarded(name: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception:  # the supervisor boundary of this task
        log.exception("action failed", process=name)
