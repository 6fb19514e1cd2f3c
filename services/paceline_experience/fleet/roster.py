"""Which processes are alive: membership that must be renewed by heartbeats.

Kept in memory only: after a restart the next heartbeat of every worker is answered with NOT_FOUND,
and it joins again at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.enums import WorkerKind
from paceline.errors import NotFoundError
from paceline.platform.telemetry.logs import Log
from paceline.types import WeightRefusal, Worker, WorkerPhase
from paceline.weights.route import TransferProgress
from paceline_experience.store.signal import Signal

MAX_PAUSE_S = 2.0
"""Between two calls of `expire`; if more time passes, this process was frozen itself."""
log = Log("roster")


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, the time of its last heartbeat, and the weights that it can serve to peers."""

    worker: Worker
    seen_s: float
    transfers: tuple[TransferProgress, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict[str, float])  # `Usage.totals`
    refusal: WeightRefusal | None = None

    @property
    def held(self) -> frozenset[int]:
        """Versions that it holds, whole or in part."""
        return frozenset(each.version for each in self.transfers)


@dataclass(frozen=True, slots=True)
class Query:
    """Selects workers; an unset field matches all. A job has its own workers and shared pools."""

    job_id: str = ""
    kind: WorkerKind | None = None
    site: str = ""

    def matches(self, worker: Worker) -> bool:
        """Whether a worker is selected."""
        return (
            (not self.job_id or worker.job_id in {"", self.job_id})
            and (not self.kind or worker.kind == self.kind)
            and (not self.site or worker.site == self.site)
        )


class Roster:
    """All members. `changed` fires for everything but load, phases and transfer progress."""

    def __init__(
        self,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float = 1.0,
    ) -> None:
        self.lease_s = lease_s
        self.changed = Signal()
        self._clock = clock
        self._refresh_s = refresh_s
        self._members: dict[str, Member] = {}
        self._checked_s: float | None = None

    def join(self, worker: Worker) -> None:
        """Add a worker, or replace it."""
        before = self._members.get(worker.worker_id)
        same = before is not None and before.worker.pid == worker.pid
        transfers = before.transfers if before is not None and same else ()
        usage = before.usage if before is not None and same else {}
        self._members[worker.worker_id] = Member(worker, self._clock(), transfers, usage)
        moving = {"load": worker.load, "phases": worker.phases}
        if before is None or replace(before.worker, **moving) != worker:
            log.info("joined", worker=worker.worker_id, kind=worker.kind, at=worker.endpoint)
            self.changed.fire()

    def beat(
        self,
        worker_id: str,
        *,
        active_version: int = -1,
        load: Mapping[str, float] | None = None,
        transfers: Sequence[TransferProgress] = (),
        usage: Mapping[str, float] | None = None,
        phases: Sequence[WorkerPhase] = (),
        refusal: WeightRefusal | None = None,
    ) -> Member:
        """Renew a membership.

        Raises:
            NotFoundError: the worker is not in the roster; it must join again.
        """
        before = self._members.get(worker_id)
        if before is None:
            raise NotFoundError(f"worker {worker_id!r} is not in the roster; join again")
        worker = replace(
            before.worker,
            active_version=active_version,
            load=dict(load or {}),
            phases=tuple(phases),
        )
        member = Member(worker, self._clock(), tuple(transfers), dict(usage or {}), refusal)
        self._members[worker_id] = member
        moved = before.worker.active_version != active_version
        if moved or before.held != member.held:
            self.changed.fire()
        return member

    def find(self, worker_id: str) -> Worker | None:
        """A worker, as of its last heartbeat; None: it is not in the roster."""
        member = self._members.get(worker_id)
        return None if member is None else member.worker

    def leave(self, worker_id: str) -> None:
        """Remove a worker; unknown ones are ignored."""
        if self._members.pop(worker_id, None) is not None:
            log.info("left", worker=worker_id)
            self.changed.fire()

    def expire(self) -> list[Worker]:
        """Remove members without a heartbeat for `lease_s`; call it every second or so.

        Time in which this process was frozen itself does not count.
        """
        now = self._clock()
        if self._checked_s is not None and now - self._checked_s > MAX_PAUSE_S:
            frozen_s = now - self._checked_s
            for name, member in self._members.items():
                seen_s = min(now, member.seen_s + frozen_s)
                self._members[name] = replace(member, seen_s=seen_s)
        self._checked_s = now
        oldest = now - self.lease_s
        expired = [m.worker for m in self._members.values() if m.seen_s < oldest]
        for worker in expired:
            del self._members[worker.worker_id]
            log.warning("expired", worker=worker.worker_id, kind=worker.kind)
        if expired:
            self.changed.fire()
        return expired

    def members(self, query: Query) -> list[Member]:
        """Matching members, by worker id."""
        found = [m for m in self._members.values() if query.matches(m.worker)]
        return sorted(found, key=lambda m: m.worker.worker_id)

    def workers(self, query: Query) -> list[Worker]:
        """Matching workers, by worker id."""
        return [member.worker for member in self.members(query)]

    async def watch(self, query: Query) -> AsyncIterator[list[Worker]]:
        """Matching workers at every change; changes of load at most every `refresh_s`."""
        last: list[Worker] | None = None
        while True:
            event = self.changed.event()
            now = self.workers(query)
            if now != last:
                yield now
                last = now
            await wait(event, self._refresh_s)


async def wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, or `timeout_s` have passed."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
