"""Open episodes: takes them in, keeps their leases, sees each one to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline import wire
from paceline.errors import InvalidError, LimitError, PacelineError, VersionGoneError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.text import clipped
from paceline.tracing import NOTHING, Span
from paceline.types import Assignment, Progress, Purpose
from paceline_environment.episode import Episode, Peers
from paceline_environment.jobs import Group, JobContext, Jobs
from paceline_environment.leases import Key, Leases, Outbox
from paceline_environment.submitter import Submitter

log = Log("worker")
_MAX_DETAIL_BYTES = 4096
_RENEW_SHARE = 3  # leases are renewed when a third of them has passed


@dataclass(slots=True)
class Open:
    """An episode that this worker holds the lease of."""

    key: Key
    purpose: Purpose
    lease_s: float
    since: float
    renewed: float
    flushed: float
    limit_s: float = float("inf")
    episode: Episode | None = None
    task: asyncio.Task[None] | None = None
    flushed_tokens: int = 0
    scored: bool = False
    span: Span = NOTHING


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a worker takes and how often it tells of it."""

    slots: int
    eval_slots: int
    flush_s: float
    flush_tokens: int


class EpisodeWorker:
    """One asyncio task for each open episode; one loop that looks after all of them."""

    def __init__(
        self, *, jobs: Jobs, peers: Peers, submitter: Submitter, limits: Limits, metrics: Metrics
    ) -> None:
        self._jobs = jobs
        self._peers = peers
        self._submitter = submitter
        self._limits = limits
        self._metrics = metrics
        self._leases: Leases | None = None
        self._open: dict[tuple[str, str, int], Open] = {}
        self._granted = {Purpose.TRAIN: 0, Purpose.EVAL: 0}  # credits not used yet
        self._held = {Purpose.TRAIN: 0, Purpose.EVAL: 0}
        self._starting: set[asyncio.Task[None]] = set()
        self._longest_step_s = 0.0
        self._draining = False
        # A rate does not see the first event of a counter.
        metrics.add("finished", 0)
        metrics.add("given_back", 0, cause="infra_error")

    @property
    def num_open(self) -> int:
        """Episodes at this moment."""
        return len(self._open)

    @property
    def longest_step_s(self) -> float:
        """That a step of a world may take by the jobs seen so far."""
        return self._longest_step_s

    def attach(self, leases: Leases) -> None:
        """Where to tell of episodes."""
        self._leases = leases

    def hello(self) -> Outbox:
        """What a new lease stream begins with."""
        self._granted = {Purpose.TRAIN: 0, Purpose.EVAL: 0}
        train, evals = self._free()
        now = self._peers.clock()
        for held in self._open.values():
            held.renewed = now
        renew = [held.key for held in self._open.values()]
        return Outbox(train, evals, renew=renew, holds_no_more=True)

    def receive(self, assignments: list[Assignment], aborts: list[Key]) -> None:
        """Work has come in, or is wanted no more."""
        for key in aborts:
            held = self._open.get(key[:3])
            if held is not None and held.key.attempt == key.attempt:
                self._close(held)
        for assignment in assignments:
            self._granted[assignment.purpose] -= len(assignment.indices)
            job = self._jobs.cached(assignment.job_id)
            opened = [self._take(assignment, at) for at in range(len(assignment.indices))]
            if job is not None:
                self._start(job, assignment, opened)
            else:
                task = asyncio.create_task(self._start_later(assignment, opened))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)

    async def keep(self) -> None:
        """Renew, flush and watch the clock until cancelled."""
        while True:
            await asyncio.sleep(min(self._limits.flush_s, 1.0) / 4)
            self.look_after(self._peers.clock())
            for purpose, count in self._held.items():
                self._metrics.set("open", count, purpose=purpose)

    def look_after(self, now: float) -> None:
        """Renew what is due, tell of new tokens, end what takes too long."""
        renew: list[Key] = []
        progress: list[Progress] = []
        for held in list(self._open.values()):
            if now - held.since > held.limit_s:
                detail = f"the episode took more than {held.limit_s:g} s"
                self._give_back(held, "infra_error", detail)
            elif self._due(held, now):
                assert held.episode is not None
                progress.append(held.episode.progress())
                held.flushed = held.renewed = now
                held.flushed_tokens = held.episode.num_sampled
            elif now - held.renewed > held.lease_s / _RENEW_SHARE:
                renew.append(held.key)
                held.renewed = now
        if self._leases is not None and (renew or progress):
            self._leases.renew(renew, progress)

    async def drain(self, timeout_s: float = 5.0) -> None:
        """Give everything back but what only waits to be acknowledged."""
        self._draining = True
        for task in self._starting:
            task.cancel()
        last: list[asyncio.Task[None]] = []
        for held in list(self._open.values()):
            if held.scored and held.task is not None:
                last.append(held.task)
                continue
            if self._leases is not None and held.episode is not None:
                self._leases.renew([], [held.episode.progress()])
            self._give_back(held, "drain", "")
        if last:
            await asyncio.wait(last, timeout=timeout_s)

    def _due(self, held: Open, now: float) -> bool:
        if held.episode is None or held.scored:
            return False
        new = held.episode.num_sampled - held.flushed_tokens
        if new <= 0:
            return False
        return now - held.flushed >= self._limits.flush_s or new >= self._limits.flush_tokens

    def _take(self, assignment: Assignment, at: int) -> Open:
        index, attempt = assignment.indices[at], assignment.attempts[at]
        key = Key(assignment.job_id, assignment.group_id, index, attempt)
        if (older := self._open.get(key[:3])) is not None:
            self._close(older)
        now = self._peers.clock()
        held = Open(key, assignment.purpose, assignment.lease_s, now, renewed=now, flushed=now)
        if assignment.traces:
            lease = self._peers.tracer.received(assignment.traces[at])
            held.span = lease.child("attempt", attempt=attempt, worker=self._peers.worker_id)
        self._open[key[:3]] = held
        self._held[assignment.purpose] += 1
        return held

    async def _start_later(self, assignment: Assignment, opened: list[Open]) -> None:
        try:
            with self._peers.stages.waits_on("experience"):
                job = await self._jobs.get(assignment.job_id)
        except PacelineError as error:
            reason = "invalid" if isinstance(error, InvalidError) else "infra_error"
            for held in opened:
                self._give_back(held, reason, str(error))
            return
        except Exception as error:  # importing a plug-in may raise anything
            log.exception("job cannot be read", job=assignment.job_id)
            for held in opened:
                self._give_back(held, "infra_error", f"{type(error).__name__}: {error}")
            return
        self._start(job, assignment, opened)

    def _start(self, job: JobContext, assignment: Assignment, opened: list[Open]) -> None:
        self._longest_step_s = max(self._longest_step_s, job.spec.tasks.step_timeout_s)
        group = Group(job=job, assignment=assignment, task=wire.task_to(assignment.task))
        earlier = {progress.index: progress for progress in assignment.progress}
        for held in opened:
            if self._open.get(held.key[:3]) is not held:
                continue
            held.limit_s = job.spec.tasks.episode_timeout_s
            held.task = asyncio.create_task(self._run(held, group, earlier.get(held.key.sibling)))

    async def _run(self, held: Open, group: Group, progress: Progress | None) -> None:
        """The boundary of one episode: whatever happens, its lease is settled."""
        key = held.key
        with held.span:
            try:
                await self._attempt(held, group, progress)
                self._peers.stages.finished += 1
                self._metrics.add("finished")
                self._close(held)
            except VersionGoneError as error:
                self._give_back(held, "version_gone", str(error))
            except LimitError as error:
                self._give_back(held, "oversized", str(error))
            except InvalidError as error:
                self._give_back(held, "invalid", str(error))
            except PacelineError as error:
                self._give_back(held, "infra_error", str(error))
            except Exception as error:  # a plug-in may raise anything
                log.exception(
                    "episode failed", job=key.job_id, group=key.group_id, index=key.sibling
                )
                self._give_back(held, "infra_error", f"{type(error).__name__}: {error}")

    async def _attempt(self, held: Open, group: Group, progress: Progress | None) -> None:
        held.span.past("prepare", held.span.start_ns)
        held.episode = Episode(
            group=group,
            index=held.key.sibling,
            attempt=held.key.attempt,
            peers=self._peers,
            progress=progress,
            span=held.span,
        )
        trajectory = await held.episode.run()
        held.scored = True
        stages = self._peers.stages
        awaits = stages.waits_on("experience")
        with stages.wait("submit"), awaits, held.span.child("submit", kind="client"):
            await self._submitter.submit(held.key.job_id, trajectory)

    def _give_back(self, held: Open, reason: str, detail: str) -> None:
        if self._open.get(held.key[:3]) is not held:
            return
        held.span.end(error=f"{reason}: {detail}")
        if reason != "drain":
            log.warning(
                "gives back",
                job=held.key.job_id,
                group=held.key.group_id,
                index=held.key.sibling,
                reason=reason,
                detail=detail,
            )
        self._metrics.add("given_back", cause=reason)
        if reason == "infra_error":
            self._peers.stages.infra_errors += 1
        if self._leases is not None:
            self._leases.give_back(held.key, reason, clipped(detail, _MAX_DETAIL_BYTES))
        self._close(held)

    def _close(self, held: Open) -> None:
        """Forget an episode and offer its slot."""
        if self._open.get(held.key[:3]) is not held:
            return
        del self._open[held.key[:3]]
        self._held[held.purpose] -= 1
        if held.task is None:
            held.span.end(error="given up")
        elif held.task is not asyncio.current_task():
            held.task.cancel()
        train, evals = self._free()
        if self._leases is not None and (train or evals):
            self._leases.add_credits(train, evals)

    def _free(self) -> tuple[int, int]:
        """Credits to grant now; they count as granted."""
        if self._draining:
            return 0, 0
        given: list[int] = []
        for purpose, slots in (
            (Purpose.TRAIN, self._limits.slots),
            (Purpose.EVAL, self._limits.eval_slots),
        ):
            free = max(0, slots - self._held[purpose] - self._granted[purpose])
            self._granted[purpose] += free
            given.append(free)
        return given[0], given[1]
