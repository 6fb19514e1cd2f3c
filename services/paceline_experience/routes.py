"""What was published of each job, and from whom each rollout worker pulls it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace

from paceline.errors import UnavailableError
from paceline.logs import Log
from paceline.types import PolicyVersion, Worker, WorkerKind
from paceline.weights.holdings import Holder, Holdings, Published
from paceline.weights.route import Route, Source, TransferProgress, TransferReport
from paceline.weights.routes.broadcast import Broadcast, Node
from paceline_experience.core import Signal
from paceline_experience.roster import Member, Query, Roster

_QUIET = ("done", "moved")
CALM_S = 0.05  # changes of routes less than this after each other are told as one
_HELD = "(eval)"  # a member that never comes; keeps the routes of the version under measurement
log = Log("routes")


@dataclass(frozen=True, slots=True)
class Publication:
    """A version and where it is seeded; rank 0, which has all of it, comes first."""

    version: PolicyVersion
    chunk_bytes: int
    seeds: tuple[Source, ...]
    site: str = ""  # of the seeds

    @property
    def source(self) -> str:
        """The endpoint that has all of it."""
        return self.seeds[0].endpoint

    def seeded(self, seed: Source) -> Publication:
        """The same with one more seed, or with that part at another endpoint."""
        others = [each for each in self.seeds if each.part != seed.part]
        return replace(self, seeds=tuple(sorted([*others, seed], key=lambda each: each.part)))


def staying(workers: Iterable[Worker], version: int) -> set[str]:
    """The workers that stay at `version` while it is measured: a quarter of all, at least one."""
    ordered = sorted(workers, key=lambda w: w.worker_id)
    behind = [w.worker_id for w in ordered if w.active_version <= version]
    return set(behind[: max(1, len(ordered) // 4)])


@dataclass(slots=True)
class _Job:
    broadcast: Broadcast
    key: bytes = field(default=b"", repr=False)
    newest: Publication | None = None
    held: int = -1  # version that some workers must stay at; -1: none
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    stays: set[str] = field(default_factory=set[str])
    changed: Signal = field(default_factory=Signal)


class Tracker:
    """One broadcast for each job, kept in step with the roster."""

    def __init__(
        self,
        roster: Roster,
        *,
        clock: Callable[[], float] = time.monotonic,
        calm_s: float = CALM_S,
    ) -> None:
        self._roster = roster
        self._clock = clock
        self._calm_s = calm_s
        self._jobs: dict[str, _Job] = {}
        self._changed = Signal()  # a job is known

    # what trainers tell

    def chunk_bytes(self, job_id: str, num_bytes: int) -> int:
        """How a new version is best cut for the workers that are there."""
        job = self._jobs.get(job_id) or self._made(job_id)
        return job.broadcast.chunk_bytes(num_bytes)

    def site(self, endpoint: str) -> str:
        """Where the trainer is that serves weights there; empty: not in the roster."""
        trainers = self._roster.workers(Query(kind=WorkerKind.TRAINER))
        return next((w.site for w in trainers if w.weights_endpoint == endpoint), "")

    def publication(self, job_id: str, version: PolicyVersion | None, seed: Source) -> Publication:
        """A new version that this seed serves, or the newest one with one seed more.

        Raises:
            UnavailableError: part 0, which makes the version, has not been announced yet.
        """
        newest = self.newest(job_id)
        if version is not None and newest is not None and newest.version.version == version.version:
            return replace(newest, version=version).seeded(seed)
        if version is None or seed.part:
            raise UnavailableError(f"part {seed.part} waits for part 0 of this step; ask again")
        chunk_bytes = self.chunk_bytes(job_id, version.num_bytes)
        return Publication(version, chunk_bytes, (seed,), self.site(seed.endpoint))

    def highest(self, job_id: str) -> int:
        """The highest version that anybody in the roster holds of a job; -1: none."""
        members = self._roster.members(Query(job_id=job_id))
        return max((max(m.held, default=-1) for m in members), default=-1)

    def announce(self, job_id: str, made: Publication, *, key: bytes, held: int = -1) -> None:
        """A version is served, or served by more seeds; `held` as in `hold`.

        Told again with nothing new but its digest, routes stay as they are.
        """
        job = self._known(job_id)
        before = job.newest
        job.key, job.newest = key, made
        if before is not None and _served(before) == _served(made):
            self.hold(job_id, held)
            return
        job.held = held
        self._target(job_id, job, newest=made.version.version)
        job.broadcast.announce(
            made.version, seeds=made.seeds, site=made.site, chunk_bytes=made.chunk_bytes
        )
        self._sync(job_id, job)
        job.changed.fire()

    def newest(self, job_id: str) -> Publication | None:
        """What was announced last."""
        job = self._jobs.get(job_id)
        return None if job is None else job.newest

    def hold(self, job_id: str, version: int) -> None:
        """Some workers stay at this version while it is measured; -1: nobody has to."""
        job = self._jobs.get(job_id)
        if job is not None and job.held != version:
            job.held = version
            self._sync(job_id, job)

    def forget(self, job_id: str) -> None:
        """The job is over."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            job.changed.fire()

    # what workers tell

    def sync(self) -> None:
        """The roster has changed."""
        for job_id, job in self._jobs.items():
            self._sync(job_id, job)

    def progress(self, member: Member) -> None:
        """What a worker holds, as of its last beat."""
        job = self._jobs.get(member.worker.job_id)
        if job is None:
            return
        if job.broadcast.progress(member.worker.worker_id, member.transfers):
            job.changed.fire()

    def report(self, job_id: str, report: TransferReport) -> None:
        """How it goes between a worker and one whom it pulls from."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        if job.broadcast.report(report):
            job.changed.fire()
        if report.event not in _QUIET:
            log.warning(
                "transfer in trouble",
                job=job_id,
                worker=report.worker_id,
                version=report.version,
                sender=report.endpoint,
                trouble=report.event,
                detail=report.detail,
            )

    # what workers and users are told

    def route(self, job_id: str, worker_id: str) -> Route | None:
        """Where a worker is to pull from at this moment; None: nothing to pull."""
        job = self._jobs.get(job_id)
        return None if job is None else job.broadcast.route(worker_id)

    async def watch(self, job_id: str, worker_id: str) -> AsyncIterator[Route]:
        """The worker's route, with the job's key, now and whenever it changes.

        Told at once, and then at most once in `calm_s`: the last change is never missed.
        """
        last: Route | None = None
        while True:
            job = self._jobs.get(job_id)
            event = self._changed.event() if job is None else job.changed.event()
            route = None if job is None else job.broadcast.route(worker_id)
            if job is not None and route is not None and route is not last:
                yield replace(route, key=job.key)
                last = route
            await asyncio.sleep(self._calm_s)
            await event.wait()

    def holdings(self, job_id: str) -> Holdings:
        """Who has what, and from whom."""
        job = self._jobs.get(job_id)
        if job is None:
            return Holdings()
        self._sync(job_id, job)
        view = job.broadcast.view()
        members = {m.worker.weights_endpoint: m for m in self._roster.members(Query(job_id=job_id))}
        return Holdings(
            tuple(
                Published(_told(v.version, job), v.chunk_bytes, v.shape, v.predicted_s, v.ratio)
                for v in view.versions
            ),
            tuple(
                Holder(
                    worker_id=h.worker_id,
                    kind=WorkerKind.ROLLOUT if h.worker_id else WorkerKind.TRAINER,
                    site=h.site,
                    endpoint=h.endpoint,
                    active_version=_active(members.get(h.endpoint)),
                    transfers=h.transfers or _transfers(members.get(h.endpoint)),
                    sources=h.sources,
                    bytes_per_s=h.bytes_per_s,
                    trouble=h.trouble,
                )
                for h in view.holders
            ),
        )

    # inside

    def _known(self, job_id: str) -> _Job:
        """The job; known from its first announcement on."""
        job = self._jobs.get(job_id)
        if job is None:
            job = self._jobs[job_id] = self._made(job_id)
            self._changed.fire()
        return job

    def _made(self, job_id: str) -> _Job:
        """As a new job is, with the workers that are there."""
        job = _Job(Broadcast(clock=self._clock))
        self._sync(job_id, job)
        return job

    def _sync(self, job_id: str, job: _Job) -> None:
        """Let the broadcast know who came, who went, and who is to stay at what is measured."""
        members = {m.worker.worker_id: m for m in self._members(job_id)}
        nodes = {name: _node(member.worker) for name, member in members.items()}
        changed = nodes != job.nodes
        for name in job.nodes.keys() - nodes.keys():
            job.broadcast.leave(name)
        for name, node in nodes.items():
            if job.nodes.get(name) != node:
                job.broadcast.join(node, members[name].transfers)
        job.nodes = nodes
        if self._target(job_id, job, newest=job.broadcast.newest) or changed:
            job.changed.fire()

    def _target(self, job_id: str, job: _Job, *, newest: int) -> bool:
        """Send some workers for the version under measurement; whether that has changed."""
        job.broadcast.target(_HELD, job.held if job.held >= 0 else None)
        stays = self._stays(job_id, job) if 0 <= job.held < newest else set[str]()
        for name in job.stays - stays:
            job.broadcast.target(name, None)
        for name in stays:
            job.broadcast.target(name, job.held)
        changed, job.stays = stays != job.stays, stays
        return changed

    def _stays(self, job_id: str, job: _Job) -> set[str]:
        workers = [member.worker for member in self._members(job_id)]
        if job.held not in job.broadcast.versions:
            # This service has begun anew: no route leads there, but some still have it.
            workers = [worker for worker in workers if worker.active_version == job.held]
        elif not self._available(job_id, job):
            return set()
        return staying(workers, job.held)

    def _available(self, job_id: str, job: _Job) -> bool:
        """Whether the held version can still be had: its last holder may have died."""
        held = [m.held for m in self._roster.members(Query(job_id=job_id)) if m.held]
        passed = [job.held not in versions and max(versions) > job.held for versions in held]
        return not (passed and all(passed))

    def _members(self, job_id: str) -> list[Member]:
        members = self._roster.members(Query(job_id=job_id, kind=WorkerKind.ROLLOUT))
        return [m for m in members if m.worker.weights_endpoint and m.worker.job_id == job_id]


def _told(version: PolicyVersion, job: _Job) -> PolicyVersion:
    """With the digest, which is told last."""
    newest = None if job.newest is None else job.newest.version
    return newest if newest is not None and newest.version == version.version else version


def _served(made: Publication) -> tuple[int, tuple[Source, ...], str]:
    """What routes depend on."""
    return made.version.version, made.seeds, made.site


def _node(worker: Worker) -> Node:
    return Node(worker.worker_id, worker.weights_endpoint, worker.site)


def _active(member: Member | None) -> int:
    return -1 if member is None else member.worker.active_version


def _transfers(member: Member | None) -> tuple[TransferProgress, ...]:
    return () if member is None else member.transfers
