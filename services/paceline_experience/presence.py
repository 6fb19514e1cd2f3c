"""Which workers have a lease stream open, and whose episodes are to be handed out again.

A process that is killed closes its connections at once, so a stream that breaks and is not made
anew within `return_s` says that its worker is dead, or cut off. Nothing depends on that being true:
each handing out is an attempt of its own, and a worker that comes back is told to stop what
somebody else has been given, and keeps the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from paceline.errors import PacelineError
from paceline.logs import Log
from paceline_experience.ledgers import Ledgers

# Workers of which only the ledger knows have so much more time to open a stream: this process has
# just started, or taken over the job.
START_TIMES = 3.0
log = Log("presence")


class Stream(Protocol):
    """A lease stream of one worker."""

    worker_id: str

    def dismiss(self) -> None:
        """Hand out nothing more, and end."""
        ...


class Presence:
    """At most one stream of each worker; the newest counts."""

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
        self._streams: dict[str, Stream] = {}
        self._absent: dict[str, float] = {}  # until when a worker may come back

    def enter(self, stream: Stream) -> None:
        """Its worker has said who it is; an older stream of it ends."""
        older = self._streams.get(stream.worker_id)
        self._streams[stream.worker_id] = stream
        self._absent.pop(stream.worker_id, None)
        if older is not None and older is not stream:
            older.dismiss()

    def leave(self, stream: Stream) -> None:
        """It has broken or ended; its worker may open another one."""
        if self._streams.get(stream.worker_id) is stream:
            del self._streams[stream.worker_id]
            self._absent[stream.worker_id] = self._clock() + self._return_s

    def lost(self, worker_id: str) -> None:
        """It does not beat any more, though its connection may stand: frozen, or cut off."""
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            stream.dismiss()
        self._absent[worker_id] = self._clock()

    async def sweep(self) -> None:
        """Have the episodes of absent workers handed out again; call it every half second or so."""
        now = self._clock()
        for worker_id in self._holders() - self._streams.keys():
            self._absent.setdefault(worker_id, now + START_TIMES * self._return_s)
        for worker_id in [name for name, until_s in self._absent.items() if until_s <= now]:
            try:
                await self.release(worker_id)
            except PacelineError as error:
                log.warning("cannot hand out again", worker=worker_id, error=error)
            else:
                self._absent.pop(worker_id, None)

    async def release(self, worker_id: str) -> None:
        """Queue again what the ledgers say that a worker has, unless it is back."""
        for job_id, entry in list(self._ledgers.active.items()):
            if not entry.ledger.held(worker_id):
                continue
            with self._ledgers.apart("cannot hand out again", job_id):
                released = await entry.ledger.release(
                    worker_id=worker_id, unless=lambda: worker_id in self._streams
                )
                if released:
                    log.warning("hands out again", worker=worker_id, job=job_id, episodes=released)

    def _holders(self) -> set[str]:
        return {
            worker_id
            for entry in self._ledgers.active.values()
            for worker_id in entry.ledger.holders()
        }
