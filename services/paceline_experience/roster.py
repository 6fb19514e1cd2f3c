"""Who is alive: membership that must be renewed.

Kept in memory only: after a restart every worker's next beat is answered with NOT_FOUND, and it
joins again at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import NotFoundError
from paceline.logs import Log
from paceline.types import Worker, WorkerKind
from paceline.weights.route import TransferProgress
from paceline_experience.core import Signal

MAX_PAUSE_S = 2.0
"""Between two looks at the members; what is more, this process did not run itself."""
log = Log("roster")


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, when it was last heard of, and the weights that it can serve to peers."""

    worker: Worker
    seen_s: float
    transfers: tuple[TransferProgress, ...] = ()

    @property
    def held(self) -> frozenset[int]:
        """Versions that it has, whole or in part."""
        return frozenset(each.version for each in self.transfers)


@dataclass(frozen=True, slots=True)
class Query:
    """Which workers; an empty field means all. A job has its own workers and the shared pools."""

    job_id: str = ""
    kind: str = ""
    site: str = ""

    def matches(self, worker: Worker) -> bool:
        """Whether a worker is asked for."""
        return (
            (not self.job_id or worker.job_id in {"", self.job_id})
            and (not self.kind or worker.kind == self.kind)
            and (not self.site or worker.site == self.site)
        )


class Roster:
    """The members. `changed` fires for everything but load and the progress of transfers."""

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
        self._looked_s: float | None = None

    def join(self, worker: Worker) -> None:
        """Enter, or replace what is known of the worker."""
        before = self._members.get(worker.worker_id)
        same = before is not None and before.worker.pid == worker.pid
        transfers = before.transfers if before is not None and same else ()
        self._members[worker.worker_id] = Member(worker, self._clock(), transfers)
        if before is None or replace(before.worker, load=worker.load) != worker:
            log.info("joined", worker=worker.worker_id, kind=worker.kind, at=worker.endpoint)
            self.changed.fire()

    def beat(
        self,
        worker_id: str,
        *,
        active_version: int = -1,
        load: Mapping[str, float] | None = None,
        transfers: Sequence[TransferProgress] = (),
    ) -> Member:
        """Renew.

        Raises:
            NotFoundError: the worker is not in the roster; it must join again.
        """
        before = self._members.get(worker_id)
        if before is None:
            raise NotFoundError(f"worker {worker_id!r} is not in the roster; join again")
        worker = replace(before.worker, active_version=active_version, load=dict(load or {}))
        member = Member(worker, self._clock(), tuple(transfers))
        self._members[worker_id] = member
        moved = before.worker.active_version != active_version
        if moved or before.held != member.held:
            self.changed.fire()
        return member

    def kind_of(self, worker_id: str) -> WorkerKind | None:
        """Of a member; None if there is none of this name."""
        member = self._members.get(worker_id)
        return None if member is None else member.worker.kind

    def leave(self, worker_id: str) -> None:
        """Go; unknown workers are ignored."""
        if self._members.pop(worker_id, None) is not None:
            log.info("left", worker=worker_id)
            self.changed.fire()

    def expire(self) -> list[Worker]:
        """Drop those that have not been heard of for `lease_s`; call it every second or so.

        A time in which this process was frozen is not held against them.
        """
        now = self._clock()
        if self._looked_s is not None and now - self._looked_s > MAX_PAUSE_S:
            frozen_s = now - self._looked_s
            for name, member in self._members.items():
                seen_s = min(now, member.seen_s + frozen_s)
                self._members[name] = replace(member, seen_s=seen_s)
        self._looked_s = now
        late = now - self.lease_s
        gone = [m.worker for m in self._members.values() if m.seen_s < late]
        for worker in gone:
            del self._members[worker.worker_id]
            log.warning("expired", worker=worker.worker_id, kind=worker.kind)
        if gone:
            self.changed.fire()
        return gone

    def members(self, query: Query) -> list[Member]:
        """Those that match, by worker id."""
        found = [m for m in self._members.values() if query.matches(m.worker)]
        return sorted(found, key=lambda m: m.worker.worker_id)

    def workers(self, query: Query) -> list[Worker]:
        """Those that match, by worker id."""
        return [member.worker for member in self.members(query)]

    async def watch(self, query: Query) -> AsyncIterator[list[Worker]]:
        """Those that match, at every change; changes of load at most every `refresh_s`."""
        last: list[Worker] | None = None
        while True:
            event = self.changed.event()
            now = self.workers(query)
            if now != last:
                yield now
                last = now
            await wait(event, self._refresh_s)


async def wait(event: asyncio.Event, most_s: float) -> None:
    """Until the event is set, or `most_s` have passed."""
    try:
        async with asyncio.timeout(most_s):
            await event.wait()
    except TimeoutError:
        return
