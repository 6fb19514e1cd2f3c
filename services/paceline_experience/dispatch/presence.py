"""Which workers have a lease stream open, and whose leases must be requeued.

A killed process closes its connections at once, so a broken stream that is not reopened within
`return_s` means that its worker is dead or cut off. Nothing depends on that being true: each lease
is an attempt of its own, and a worker that reconnects is told to abort what others have leased
since, and keeps the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline_experience.jobs.ledgers import Ledgers

# Workers that only the ledger knows have this many times `return_s` to open a stream: this process
# has just started, or taken over the job.
STARTUP_FACTOR = 3.0
log = Log("presence")


class LeaseStream(Protocol):
    """A lease stream of one worker."""

    worker_id: str

    def dismiss(self) -> None:
        """Lease nothing more, and end the stream."""
        ...


class Presence:
    """At most one stream per worker: the newest."""

    def __init__(
        self,
        ledgers: Ledgers,
        *,
        return_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledgers = ledgers
        self._return_s = return_s
        self._clock = clock
        self._streams: dict[str, LeaseStream] = {}
        self._absent: dict[str, float] = {}  # deadlines for workers to reconnect

    def enter(self, stream: LeaseStream) -> None:
        """The stream's worker is known; ends an older stream of it."""
        older = self._streams.get(stream.worker_id)
        self._streams[stream.worker_id] = stream
        self._absent.pop(stream.worker_id, None)
        if older is not None and older is not stream:
            older.dismiss()

    def leave(self, stream: LeaseStream) -> None:
        """The stream has broken or ended; its worker may open another one."""
        if self._streams.get(stream.worker_id) is stream:
            del self._streams[stream.worker_id]
            self._absent[stream.worker_id] = self._clock() + self._return_s

    def lost(self, worker_id: str) -> None:
        """The worker's heartbeats have stopped, though its connection may still be open."""
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            stream.dismiss()
        self._absent[worker_id] = self._clock()

    async def sweep(self) -> None:
        """Requeue the leases of absent workers; call it every half second or so."""
        now = self._clock()
        for worker_id in self._holders() - self._streams.keys():
            self._absent.setdefault(worker_id, now + STARTUP_FACTOR * self._return_s)
        for worker_id in [name for name, until_s in self._absent.items() if until_s <= now]:
            try:
                await self.release(worker_id)
            except PacelineError as error:
                log.warning("cannot requeue leases", worker=worker_id, error=error)
            else:
                self._absent.pop(worker_id, None)

    async def release(self, worker_id: str) -> None:
        """Requeue all leases of a worker, unless it has reconnected."""
        for job_id, entry in list(self._ledgers.active.items()):
            if not entry.ledger.held(worker_id):
                continue
            with self._ledgers.isolate("cannot requeue leases", job_id):
                released = await entry.ledger.leases.release(
                    worker_id, unless=lambda: worker_id in self._streams
                )
                if released:
                    log.warning("requeued leases", worker=worker_id, job=job_id, episodes=released)

    def _holders(self) -> set[str]:
        return {
            worker_id
            for entry in self._ledgers.active.values()
            for worker_id in entry.ledger.holders()
        }
