"""The published versions of each job, and the route by which each rollout worker pulls them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace

from paceline.enums import WorkerKind
from paceline.errors import UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.types import PolicyVersion, Worker
from paceline.weights.placement import PublishedVersion, WeightHolder, WeightPlacement
from paceline.weights.route import (
    QUIET_EVENTS,
    ChunkSource,
    Route,
    TransferProgress,
    TransferReport,
)
from paceline_experience.fleet.roster import Member, Query, Roster
from paceline_experience.fleet.routing.broadcast import Broadcast, Node
from paceline_experience.store.signal import Signal

DEBOUNCE_S = 0.05  # route changes that follow each other faster are sent as one
_HELD = "(eval)"  # a pseudo-member that keeps the routes of the version under measurement
log = Log("routes")


@dataclass(frozen=True, slots=True)
class SeededVersion:
    """A version and its seeds; rank 0, which has all of it, comes first."""

    version: PolicyVersion
    chunk_bytes: int
    seeds: tuple[ChunkSource, ...]
    site: str = ""  # of the seeds

    @property
    def source(self) -> str:
        """The endpoint of the seed that has all of it."""
        return self.seeds[0].endpoint

    def with_seed(self, seed: ChunkSource) -> SeededVersion:
        """A copy with one more seed, or with that part at another endpoint."""
        others = [each for each in self.seeds if each.part != seed.part]
        return replace(self, seeds=tuple(sorted([*others, seed], key=lambda each: each.part)))


def held_workers(workers: Iterable[Worker], version: int) -> set[str]:
    """Workers to hold at `version` while it is measured: a quarter of all, at least one."""
    ordered = sorted(workers, key=lambda w: w.worker_id)
    behind = [w.worker_id for w in ordered if w.active_version <= version]
    return set(behind[: max(1, len(ordered) // 4)])


@dataclass(slots=True)
class _JobBroadcast:
    broadcast: Broadcast
    key: bytes = field(default=b"", repr=False)
    newest: SeededVersion | None = None
    held: int = -1  # version at which some workers are held; -1: none
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    held_workers: set[str] = field(default_factory=set[str])
    changed: Signal = field(default_factory=Signal)


class RoutePlanner:
    """One broadcast for each job, kept in step with the roster."""

    def __init__(
        self,
        roster: Roster,
        *,
        clock: Callable[[], float] = time.monotonic,
        debounce_s: float = DEBOUNCE_S,
    ) -> None:
        self._roster = roster
        self._clock = clock
        self._debounce_s = debounce_s
        self._jobs: dict[str, _JobBroadcast] = {}
        self._changed = Signal()  # a job is known

    # called for trainers

    def chunk_bytes(self, job_id: str, num_bytes: int) -> int:
        """The best chunk size of a new version for the present workers."""
        job = self._jobs.get(job_id) or self._new_job(job_id)
        return job.broadcast.chunk_bytes(num_bytes)

    def site(self, endpoint: str) -> str:
        """The site of the trainer that serves weights at `endpoint`; empty: not in the roster."""
        trainers = self._roster.workers(Query(kind=WorkerKind.TRAINER))
        return next((w.site for w in trainers if w.weights_endpoint == endpoint), "")

    def publication(
        self, job_id: str, version: PolicyVersion | None, seed: ChunkSource
    ) -> SeededVersion:
        """A new version served by this seed, or the newest one with one more seed.

        Raises:
            UnavailableError: part 0, which creates the version, has not been announced yet.
        """
        newest = self.newest(job_id)
        if version is not None and newest is not None and newest.version.version == version.version:
            return replace(newest, version=version).with_seed(seed)
        if version is None or seed.part:
            raise UnavailableError(f"part {seed.part} waits for part 0 of this step; retry")
        chunk_bytes = self.chunk_bytes(job_id, version.num_bytes)
        return SeededVersion(version, chunk_bytes, (seed,), self.site(seed.endpoint))

    def highest(self, job_id: str) -> int:
        """The highest version of a job that any member of the roster holds; -1: none."""
        members = self._roster.members(Query(job_id=job_id))
        return max((max(m.held, default=-1) for m in members), default=-1)

    def announce(
        self, job_id: str, published: SeededVersion, *, key: bytes, held: int = -1
    ) -> None:
        """A version is served, or has more seeds; `held` as in `hold`.

        If nothing but its digest is new, routes stay as they are.
        """
        job = self._job(job_id)
        before = job.newest
        job.key, job.newest = key, published
        if before is not None and _seeding(before) == _seeding(published):
            self.hold(job_id, held)
            return
        job.held = held
        self._set_targets(job_id, job, newest=published.version.version)
        job.broadcast.announce(
            published.version,
            seeds=published.seeds,
            site=published.site,
            chunk_bytes=published.chunk_bytes,
        )
        self._sync(job_id, job)
        job.changed.fire()

    def newest(self, job_id: str) -> SeededVersion | None:
        """The version announced last."""
        job = self._jobs.get(job_id)
        return None if job is None else job.newest

    def withdraw(self, job_id: str, version: int) -> None:
        """Route nobody to this version any more."""
        job = self._jobs.get(job_id)
        if job is not None and job.broadcast.withdraw(version):
            self._sync(job_id, job)
            job.changed.fire()

    def hold(self, job_id: str, version: int) -> None:
        """Hold some workers at this version while it is measured; -1: none."""
        job = self._jobs.get(job_id)
        if job is not None and job.held != version:
            job.held = version
            self._sync(job_id, job)

    def forget(self, job_id: str) -> None:
        """The job is over."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            job.changed.fire()

    # called for workers

    def sync(self) -> None:
        """The roster has changed."""
        for job_id, job in self._jobs.items():
            self._sync(job_id, job)

    def progress(self, member: Member) -> None:
        """A member's transfers, as of its last heartbeat."""
        job = self._jobs.get(member.worker.job_id)
        if job is None:
            return
        if job.broadcast.progress(member.worker.worker_id, member.transfers):
            job.changed.fire()

    def report(self, job_id: str, report: TransferReport) -> None:
        """A worker's report on a transfer from one of its sources."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        if job.broadcast.report(report):
            job.changed.fire()
        if report.event not in QUIET_EVENTS:
            log.warning(
                "transfer failing",
                job=job_id,
                worker=report.worker_id,
                version=report.version,
                sender=report.endpoint,
                trouble=report.event,
                detail=report.detail,
            )

    # answers to workers and users

    def receivers(self, job_id: str) -> list[Member]:
        """The job's rollout workers that follow routes."""
        members = self._roster.members(Query(job_id=job_id, kind=WorkerKind.ROLLOUT))
        return [m for m in members if m.worker.weights_endpoint and m.worker.job_id == job_id]

    def route(self, job_id: str, worker_id: str) -> Route | None:
        """A worker's present route; None: nothing to pull."""
        job = self._jobs.get(job_id)
        return None if job is None else job.broadcast.route(worker_id)

    async def watch(self, job_id: str, worker_id: str) -> AsyncIterator[Route]:
        """The worker's route, with the job's key, now and whenever it changes.

        At most one per `debounce_s`; the last change is never missed.
        """
        last: Route | None = None
        while True:
            job = self._jobs.get(job_id)
            event = self._changed.event() if job is None else job.changed.event()
            route = None if job is None else job.broadcast.route(worker_id)
            if job is not None and route is not None and route is not last:
                yield replace(route, key=job.key)
                last = route
            await asyncio.sleep(self._debounce_s)
            await event.wait()

    def placement(self, job_id: str) -> WeightPlacement:
        """Who holds which versions, and pulls them from whom."""
        job = self._jobs.get(job_id)
        if job is None:
            return WeightPlacement()
        self._sync(job_id, job)
        view = job.broadcast.view()
        members = {m.worker.weights_endpoint: m for m in self._roster.members(Query(job_id=job_id))}
        return WeightPlacement(
            tuple(
                PublishedVersion(
                    _with_digest(v.version, job), v.chunk_bytes, v.shape, v.predicted_s, v.ratio
                )
                for v in view.versions
            ),
            tuple(
                WeightHolder(
                    worker_id=h.worker_id,
                    kind=WorkerKind.ROLLOUT if h.worker_id else WorkerKind.TRAINER,
                    site=h.site,
                    endpoint=h.endpoint,
                    active_version=_active(members.get(h.endpoint)),
                    transfers=h.transfers or _transfers(members.get(h.endpoint)),
                    sources=h.sources,
                    bytes_per_s=h.bytes_per_s,
                    trouble=h.trouble or _refused(members.get(h.endpoint)),
                )
                for h in view.holders
            ),
        )

    # internal

    def _job(self, job_id: str) -> _JobBroadcast:
        """The job's broadcast; created by the first announcement."""
        job = self._jobs.get(job_id)
        if job is None:
            job = self._jobs[job_id] = self._new_job(job_id)
            self._changed.fire()
        return job

    def _new_job(self, job_id: str) -> _JobBroadcast:
        """A broadcast with the present workers."""
        job = _JobBroadcast(Broadcast(clock=self._clock))
        self._sync(job_id, job)
        return job

    def _sync(self, job_id: str, job: _JobBroadcast) -> None:
        """Update the broadcast with workers that joined or left, and with those to be held."""
        members = {m.worker.worker_id: m for m in self.receivers(job_id)}
        nodes = {name: _node(member.worker) for name, member in members.items()}
        changed = nodes != job.nodes
        for name in job.nodes.keys() - nodes.keys():
            job.broadcast.leave(name)
        for name, node in nodes.items():
            if job.nodes.get(name) != node:
                job.broadcast.join(node, members[name].transfers)
        job.nodes = nodes
        if self._set_targets(job_id, job, newest=job.broadcast.newest) or changed:
            job.changed.fire()

    def _set_targets(self, job_id: str, job: _JobBroadcast, *, newest: int) -> bool:
        """Target some workers at the version under measurement; returns whether that changed."""
        job.broadcast.target(_HELD, job.held if job.held >= 0 else None)
        held = self._held_workers(job_id, job) if 0 <= job.held < newest else set[str]()
        for name in job.held_workers - held:
            job.broadcast.target(name, None)
        for name in held:
            job.broadcast.target(name, job.held)
        changed, job.held_workers = held != job.held_workers, held
        return changed

    def _held_workers(self, job_id: str, job: _JobBroadcast) -> set[str]:
        workers = [member.worker for member in self.receivers(job_id)]
        if job.held not in job.broadcast.versions:
            # This service has restarted: there is no route to it, but some workers still have it.
            workers = [worker for worker in workers if worker.active_version == job.held]
        elif not self._available(job_id, job):
            return set()
        return held_workers(workers, job.held)

    def _available(self, job_id: str, job: _JobBroadcast) -> bool:
        """Whether the held version can still be pulled: its last holder may have died."""
        held = [m.held for m in self._roster.members(Query(job_id=job_id)) if m.held]
        passed = [job.held not in versions and max(versions) > job.held for versions in held]
        return not (passed and all(passed))


def _with_digest(version: PolicyVersion, job: _JobBroadcast) -> PolicyVersion:
    """With its digest, which arrives after the first announcement."""
    newest = None if job.newest is None else job.newest.version
    return newest if newest is not None and newest.version == version.version else version


def _seeding(published: SeededVersion) -> tuple[int, tuple[ChunkSource, ...], str]:
    """The fields that routes depend on."""
    return published.version.version, published.seeds, published.site


def _node(worker: Worker) -> Node:
    return Node(worker.worker_id, worker.weights_endpoint, worker.site)


def _active(member: Member | None) -> int:
    return -1 if member is None else member.worker.active_version


def _transfers(member: Member | None) -> tuple[TransferProgress, ...]:
    return () if member is None else member.transfers


def _refused(member: Member | None) -> str:
    """What a worker says against a version, for people; empty: nothing."""
    refusal = None if member is None else member.refusal
    return "" if refusal is None else f"refuses version {refusal.version}: {refusal.reason}"
