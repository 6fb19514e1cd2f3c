"""Runs the episodes that this worker has leased, and settles every lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.enums import GiveBackReason, Purpose
from paceline.errors import InvalidError, LimitError, PacelineError, VersionGoneError
from paceline.isolation.code.install import InstallError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import NOTHING, Span
from paceline.platform.text import clipped
from paceline.platform.transport.endpoints import DeniedError
from paceline.types import Assignment, EpisodeProgress
from paceline.v1 import types_pb2
from paceline_environment.episodes.episode import Episode
from paceline_environment.episodes.peers import EpisodePeers
from paceline_environment.jobs import GroupContext, JobContext, Jobs
from paceline_environment.leases import Key, LeaseClient, LeaseOutbox
from paceline_environment.submitter import Submitter

log = Log("worker")
_MAX_DETAIL_BYTES = 4096
_INSTALL_WAIT_S = 30.0
_RENEW_SHARE = 3  # a lease is renewed after a third of its duration
_NEVER = float("inf")
_PATIENCE = 8  # tokens that were sampled within `flush_s` are saved after so many times as long


@dataclass(slots=True)
class OpenEpisode:
    """An episode that this worker holds the lease of."""

    key: Key
    purpose: Purpose
    lease_s: float
    since: float
    renewed: float
    unsaved_since: float | None = None  # when tokens were first seen that are not saved yet
    limit_s: float = _NEVER
    episode: Episode | None = None
    task: asyncio.Task[None] | None = None
    flushed_tokens: int = 0
    flushed_s: float = 0.0  # how long they took to sample
    flushed_sampled: bool = False
    quiet_until: float = 0.0  # nothing is due before, unless the episode has changed
    changes: int = -1  # of the episode, when that was found
    scored: bool = False
    span: Span = NOTHING


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """Slots of a worker, and how often it saves the progress of its episodes."""

    slots: int
    eval_slots: int
    flush_s: float
    flush_tokens: int


class EpisodeWorker:
    """One asyncio task per open episode, and one loop that renews, saves and times out."""

    def __init__(
        self,
        *,
        jobs: Jobs,
        peers: EpisodePeers,
        submitter: Submitter,
        limits: WorkerCapacity,
        metrics: Metrics,
    ) -> None:
        self._jobs = jobs
        self._peers = peers
        self._submitter = submitter
        self._limits = limits
        self._metrics = metrics
        self._leases: LeaseClient | None = None
        self._open: dict[tuple[str, str, int], OpenEpisode] = {}
        self._granted = {Purpose.TRAIN: 0, Purpose.EVAL: 0}  # credits not used yet
        self._num_leased = {Purpose.TRAIN: 0, Purpose.EVAL: 0}
        self._starting: set[asyncio.Task[None]] = set()
        self._longest_step_s = 0.0
        self._draining = False
        # A rate does not see the first event of a counter.
        metrics.add("finished", 0)
        metrics.add("given_back", 0, cause=GiveBackReason.INFRA_ERROR)

    @property
    def num_open(self) -> int:
        """Number of open episodes."""
        return len(self._open)

    @property
    def longest_step_s(self) -> float:
        """The longest `step_timeout_s` of the jobs seen so far."""
        return self._longest_step_s

    def attach(self, leases: LeaseClient) -> None:
        """Set the client through which leases are renewed and given back."""
        self._leases = leases

    def hello(self) -> LeaseOutbox:
        """The first message of a new lease stream."""
        self._granted = {Purpose.TRAIN: 0, Purpose.EVAL: 0}
        train, evals = self._free()
        now = self._peers.clock()
        for leased in self._open.values():
            leased.renewed, leased.quiet_until = now, 0.0
            # Whoever answers may be another process, which has not been told.
            leased.flushed_sampled = False
        renew = [leased.key for leased in self._open.values()]
        return LeaseOutbox(train, evals, renew=renew, renew_is_complete=True)

    def receive(
        self, assignments: list[Assignment], aborts: list[Key], recalled: Sequence[Key] = ()
    ) -> None:
        """Start new assignments, cancel aborted episodes, give back recalled ones."""
        for key in recalled:
            leased = self._open.get(key[:3])
            if leased is not None and leased.key.attempt == key.attempt and not leased.scored:
                self._hand_over(leased, "recalled")
        for key in aborts:
            leased = self._open.get(key[:3])
            if leased is not None and leased.key.attempt == key.attempt:
                self._close(leased)
        for assignment in assignments:
            self._granted[assignment.purpose] -= len(assignment.indices)
            job = self._jobs.cached(assignment.job_id)
            opened = [
                self._open_episode(assignment, position)
                for position in range(len(assignment.indices))
            ]
            if job is not None:
                self._start(job, assignment, opened)
            else:
                task = asyncio.create_task(self._read_and_start(assignment, opened))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)

    async def run(self) -> None:
        """Maintain open episodes until cancelled."""
        while True:
            await asyncio.sleep(min(self._limits.flush_s, 1.0) / 4)
            self._peers.calls.sweep()
            self.maintain(self._peers.clock())
            for purpose, count in self._num_leased.items():
                self._metrics.set("open", count, purpose=purpose)
            self._metrics.total("finished", self._peers.stages.finished)
            self._metrics.total("received_tokens", self._peers.stages.tokens_received)

    def maintain(self, now: float) -> None:
        """Renew leases that are due, save new tokens, end episodes that exceed their timeout."""
        renew: list[Key] = []
        progress: list[EpisodeProgress] = []
        for leased in list(self._open.values()):
            episode = leased.episode
            # Most are quiet: looking at all of them would take a twentieth of the CPU time.
            if now < leased.quiet_until and (
                episode is None or (episode.changes == leased.changes and not episode.samples)
            ):
                continue
            save_at = self._save_at(leased, now)
            ends_at = leased.since + leased.limit_s
            if episode is not None:
                ends_at += episode.waited_s(now)
            if now > ends_at:
                detail = f"the episode took more than {leased.limit_s:g} s"
                self._give_back(leased, GiveBackReason.INFRA_ERROR, detail)
                continue
            if episode is not None and now >= save_at:
                progress.append(episode.progress())
                leased.renewed, leased.unsaved_since = now, None
                leased.flushed_tokens = episode.num_sampled
                leased.flushed_s = episode.sampling_s(now)
                leased.flushed_sampled = episode.sampled
                save_at = _NEVER
            elif now - leased.renewed > leased.lease_s / _RENEW_SHARE:
                renew.append(leased.key)
                leased.renewed = now
            leased.changes = -1 if episode is None else episode.changes
            renew_at = leased.renewed + leased.lease_s / _RENEW_SHARE
            leased.quiet_until = min(save_at, renew_at, ends_at)
        if self._leases is not None and (renew or progress):
            self._leases.renew(renew, progress)

    async def drain(self, timeout_s: float = 5.0) -> None:
        """Give back all episodes except those that only wait for an acknowledgement."""
        self._draining = True
        for task in self._starting:
            task.cancel()
        submitting: list[asyncio.Task[None]] = []
        for leased in list(self._open.values()):
            if leased.scored and leased.task is not None:
                submitting.append(leased.task)
                continue
            self._hand_over(leased, "")
        if submitting:
            await asyncio.wait(submitting, timeout=timeout_s)

    def _hand_over(self, leased: OpenEpisode, detail: str) -> None:
        if self._leases is not None and leased.episode is not None:
            self._leases.renew([], [leased.episode.progress()])
        self._give_back(leased, GiveBackReason.DRAIN, detail)

    def _save_at(self, leased: OpenEpisode, now: float) -> float:
        """When to save tokens, if there will be no more: the longer they took, the sooner.

        So an episode whose short turn was followed by a slow step of its environment is not saved
        for the few tokens that it would lose.
        """
        episode = leased.episode
        if episode is None or leased.scored:
            return _NEVER
        new = episode.num_sampled - leased.flushed_tokens
        # An evaluation holds rollout workers until it is told that no more tokens are needed.
        waits = leased.purpose is Purpose.EVAL and episode.sampled and not leased.flushed_sampled
        if new <= 0 and not waits:
            return _NEVER
        if leased.unsaved_since is None:
            leased.unsaved_since = now
        if new >= self._limits.flush_tokens:
            return now
        flush_s = self._limits.flush_s
        lost_s = episode.sampling_s(now) - leased.flushed_s
        soon = waits or lost_s >= flush_s
        return leased.unsaved_since + (flush_s if soon else _PATIENCE * flush_s)

    def _open_episode(self, assignment: Assignment, position: int) -> OpenEpisode:
        index, attempt = assignment.indices[position], assignment.attempts[position]
        key = Key(assignment.job_id, assignment.group_id, index, attempt)
        if (older := self._open.get(key[:3])) is not None:
            self._close(older)
        now = self._peers.clock()
        leased = OpenEpisode(key, assignment.purpose, assignment.lease_s, now, renewed=now)
        if assignment.traces:
            lease = self._peers.tracer.received(assignment.traces[position])
            leased.span = lease.child("attempt", attempt=attempt, worker=self._peers.worker_id)
        self._open[key[:3]] = leased
        self._num_leased[assignment.purpose] += 1
        return leased

    async def _read_and_start(self, assignment: Assignment, opened: list[OpenEpisode]) -> None:
        try:
            stages = self._peers.stages
            with (
                stages.of(assignment.job_id, assignment.pinned_version).wait("load"),
                stages.waits_on("experience"),
            ):
                job = await self._jobs.get(assignment.job_id)
        except PacelineError as error:
            if isinstance(error, InstallError):  # else this worker would soon fail all its tasks
                await asyncio.sleep(_INSTALL_WAIT_S)
            is_invalid = isinstance(error, InvalidError)
            reason = GiveBackReason.INVALID if is_invalid else GiveBackReason.INFRA_ERROR
            for leased in opened:
                self._give_back(leased, reason, str(error))
            return
        except Exception as error:  # the supervisor boundary of a group
            log.exception("job cannot be read", job=assignment.job_id)
            for leased in opened:
                self._give_back(
                    leased, GiveBackReason.INFRA_ERROR, f"{type(error).__name__}: {error}"
                )
            return
        self._start(job, assignment, opened)

    def _start(self, job: JobContext, assignment: Assignment, opened: list[OpenEpisode]) -> None:
        self._longest_step_s = max(self._longest_step_s, job.spec.tasks.step_timeout_s)
        group = GroupContext(
            job=job, assignment=assignment, task=wire.to_proto(assignment.task, types_pb2.Task)
        )
        earlier = {progress.index: progress for progress in assignment.progress}
        for leased in opened:
            if self._open.get(leased.key[:3]) is not leased:
                continue
            leased.limit_s, leased.quiet_until = job.spec.tasks.episode_timeout_s, 0.0
            leased.task = asyncio.create_task(
                self._run(leased, group, earlier.get(leased.key.sibling))
            )

    async def _run(
        self, leased: OpenEpisode, group: GroupContext, progress: EpisodeProgress | None
    ) -> None:
        """Supervise one episode: however it ends, its lease is settled."""
        key = leased.key
        with leased.span:
            try:
                await self._attempt(leased, group, progress)
                self._peers.stages.finished += 1
                leased.task = None
                self._close(leased)
            except VersionGoneError as error:
                self._give_back(leased, GiveBackReason.VERSION_GONE, str(error))
            except LimitError as error:
                self._give_back(leased, GiveBackReason.OVERSIZED, str(error))
            except DeniedError as error:
                self._give_back(leased, GiveBackReason.DENIED, str(error))
            except InvalidError as error:
                self._give_back(leased, GiveBackReason.INVALID, str(error))
            except PacelineError as error:
                self._give_back(leased, GiveBackReason.INFRA_ERROR, str(error))
            except Exception as error:  # the supervisor boundary of an episode
                log.exception(
                    "episode failed", job=key.job_id, group=key.group_id, index=key.sibling
                )
                self._give_back(
                    leased, GiveBackReason.INFRA_ERROR, f"{type(error).__name__}: {error}"
                )

    async def _attempt(
        self, leased: OpenEpisode, group: GroupContext, progress: EpisodeProgress | None
    ) -> None:
        assert leased.task is not None  # it runs this
        leased.span.past("prepare", leased.span.start_ns)
        leased.episode = Episode(
            group=group,
            index=leased.key.sibling,
            attempt=leased.key.attempt,
            peers=self._peers,
            task=leased.task,
            progress=progress,
            span=leased.span,
        )
        trajectory = await leased.episode.run()
        leased.scored = True
        stages = self._peers.stages
        awaits = stages.waits_on("experience")
        submits = stages.of(leased.key.job_id, group.assignment.pinned_version).wait("submit")
        with submits, awaits, leased.span.child("submit", kind="client"):
            # Episodes scored in one message are submitted in one.
            together = leased.episode.scored_with_others
            await self._submitter.submit(leased.key.job_id, trajectory, soon=together)

    def _give_back(self, leased: OpenEpisode, reason: GiveBackReason, detail: str) -> None:
        if self._open.get(leased.key[:3]) is not leased:
            return
        leased.span.end(error=f"{reason}: {detail}")
        if reason is not GiveBackReason.DRAIN:
            log.warning(
                "lease given back",
                job=leased.key.job_id,
                group=leased.key.group_id,
                index=leased.key.sibling,
                reason=reason,
                detail=detail,
            )
        self._metrics.add("given_back", cause=reason)
        if reason is GiveBackReason.INFRA_ERROR:
            self._peers.stages.infra_errors += 1
        if self._leases is not None:
            self._leases.give_back(leased.key, reason, clipped(detail, _MAX_DETAIL_BYTES))
        self._close(leased)

    def _close(self, leased: OpenEpisode) -> None:
        """Drop an episode and offer its slot."""
        if self._open.get(leased.key[:3]) is not leased:
            return
        del self._open[leased.key[:3]]
        self._num_leased[leased.purpose] -= 1
        if leased.task is None:  # it has not begun, or has ended by itself
            leased.span.end(error="" if leased.scored else "aborted")
        elif leased.task is not asyncio.current_task():
            leased.task.cancel()
        train, evals = self._free()
        if self._leases is not None and (train or evals):
            self._leases.add_credits(train, evals)

    def _free(self) -> tuple[int, int]:
        """Credits of free slots that are not granted yet, which are granted by this call."""
        if self._draining:
            return 0, 0
        offered: list[int] = []
        for purpose, slots in (
            (Purpose.TRAIN, self._limits.slots),
            (Purpose.EVAL, self._limits.eval_slots),
        ):
            free = max(0, slots - self._num_leased[purpose] - self._granted[purpose])
            self._granted[purpose] += free
            offered.append(free)
        return offered[0], offered[1]
