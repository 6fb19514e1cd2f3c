"""Which parent each rollout worker pulls a policy version from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.types import PolicyVersion, WorkerKind
from paceline_experience.roster import Query, Roster

_KEPT_VERSIONS = 1024


@dataclass(frozen=True, slots=True)
class Peer:
    """A rollout worker as a link of the chain."""

    worker_id: str
    endpoint: str
    active_version: int = -1
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """Pull `version` from `parent`; if it fails, from any of `fallbacks`."""

    version: PolicyVersion
    parent: str
    fallbacks: tuple[str, ...]


def staying(peers: Iterable[Peer], version: int) -> set[str]:
    """The workers that stay at `version` while it is measured: a quarter of all, at least one."""
    ordered = sorted(peers, key=lambda p: p.worker_id)
    behind = [p.worker_id for p in ordered if p.active_version <= version]
    return set(behind[: max(1, len(ordered) // 4)])


def plan(
    version: PolicyVersion, source: str, *, peers: Sequence[Peer], takers: set[str]
) -> dict[str, Route]:
    """One chain: source → workers that hold the version → the other takers, each by worker id.

    So a late joiner is served by a peer, and who already holds the version keeps its place.
    """
    holders = [p for p in peers if version.version in p.held]
    others = [p for p in peers if version.version not in p.held and p.worker_id in takers]
    chain = [*sorted(holders, key=_name), *sorted(others, key=_name)]
    routes: dict[str, Route] = {}
    parent = source
    for peer in chain:
        if peer.worker_id in takers:
            helpers = [p.endpoint for p in holders if p is not peer]
            fallbacks = [e for e in [*helpers, source] if e != parent]
            routes[peer.worker_id] = Route(version, parent, tuple(fallbacks))
        parent = peer.endpoint
    return routes


def _name(peer: Peer) -> str:
    return peer.worker_id


@dataclass(slots=True)
class _Published:
    source: str = ""
    newest: int = -1
    held: int = -1  # version that some workers must stay at; -1: none
    versions: dict[int, PolicyVersion] = field(default_factory=dict[int, PolicyVersion])


class Tracker:
    """Knows what was published, and tells every rollout worker its route."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._jobs: dict[str, _Published] = {}

    def announce(self, job_id: str, version: PolicyVersion, *, source: str, held: int = -1) -> None:
        """A new version is served at `source`; `held` as in `hold`."""
        job = self._jobs.setdefault(job_id, _Published())
        job.source, job.held = source, held
        job.newest = max(job.newest, version.version)
        job.versions[version.version] = version
        if len(job.versions) > _KEPT_VERSIONS:
            del job.versions[min(job.versions)]
        self._roster.changed.fire()

    def hold(self, job_id: str, version: int) -> None:
        """Some workers stay at this version while it is measured; -1: nobody has to."""
        job = self._jobs.get(job_id)
        if job is not None and job.held != version:
            job.held = version
            self._roster.changed.fire()

    def forget(self, job_id: str) -> None:
        """The job is over."""
        self._jobs.pop(job_id, None)

    def route(self, job_id: str, worker_id: str) -> Route | None:
        """Where a worker is to pull from at this moment; None: nothing to pull."""
        job = self._jobs.get(job_id)
        peers = self._peers(job_id)
        if job is None or worker_id not in {p.worker_id for p in peers}:
            return None
        everyone = {p.worker_id for p in peers}
        splits = 0 <= job.held < job.newest and self._available(job_id, job)
        stays = staying(peers, job.held) if splits else set[str]()
        if worker_id in stays:
            version, takers = job.versions[job.held], stays
        else:
            version, takers = job.versions[job.newest], everyone - stays
        return plan(version, job.source, peers=peers, takers=takers)[worker_id]

    def _available(self, job_id: str, job: _Published) -> bool:
        """Whether the held version can still be had: its last holder may have died."""
        held = [m.held for m in self._roster.members(Query(job_id=job_id)) if m.held]
        passed = [job.held not in versions and max(versions) > job.held for versions in held]
        return job.held in job.versions and not (passed and all(passed))

    async def watch(self, job_id: str, worker_id: str) -> AsyncIterator[Route]:
        """The worker's route for each newer version, and again when its parent is gone."""
        last: Route | None = None
        while True:
            event = self._roster.changed.event()
            route = self.route(job_id, worker_id)
            if route is not None and self._is_news(job_id, route, last):
                yield route
                last = route
            await event.wait()

    def _is_news(self, job_id: str, route: Route, last: Route | None) -> bool:
        if last is None or route.version.version > last.version.version:
            return True
        same = route.version.version == last.version.version
        return same and route.parent != last.parent and not self._alive(job_id, last.parent)

    def _alive(self, job_id: str, endpoint: str) -> bool:
        source = self._jobs[job_id].source
        return endpoint == source or endpoint in {p.endpoint for p in self._peers(job_id)}

    def _peers(self, job_id: str) -> list[Peer]:
        members = self._roster.members(Query(job_id=job_id, kind=WorkerKind.ROLLOUT))
        return [
            Peer(m.worker.worker_id, m.worker.weights_endpoint, m.worker.active_version, m.held)
            for m in members
            if m.worker.weights_endpoint and m.worker.job_id == job_id
        ]
