"""Keeps one worker at the newest version of a job's weights, following assigned routes.

Each version is one `Transfer`; `stream/chunk_reader.py` receives and verifies its chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.config.service import TlsSettings
from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.types import PolicyVersion
from paceline.weights.route import Route, TransferProgress, TransferReport
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.memory import SharedMemory
from paceline.weights.snapshot.staging import Staging
from paceline.weights.stream.http import peer_tls
from paceline.weights.stream.rate_limit import RateLimit
from paceline.weights.transfer.server import WeightServer
from paceline.weights.transfer.version_transfer import Transfer

log = Log("weights")

_RETRY_S = 0.5
_SUPERSEDED_STALL_TIMEOUT_S = 2.0


class VersionTransfer(Protocol):
    """What brings one version; `Transfer` does so over HTTP."""

    stall_timeout_s: float
    """Without progress, while all sources fail."""

    @property
    def version(self) -> int:
        """The version being transferred."""
        ...

    @property
    def staging(self) -> Staging | None:
        """What has arrived of it; None: nothing."""
        ...

    @property
    def num_ready(self) -> int:
        """Number of chunks received."""
        ...

    def is_complete(self) -> bool:
        """Whether all chunks are received."""
        ...

    def is_half_done(self) -> bool:
        """Whether at least half of the chunks are received."""
        ...

    def progress(self) -> TransferProgress:
        """Chunks received so far, and the current sources."""
        ...

    def reroute(self, route: Route) -> None:
        """Continue by another route to the same version."""
        ...

    async def run(self) -> Staging:
        """Run until the snapshot is complete; raises when no source makes progress."""
        ...


@dataclass(frozen=True, slots=True)
class Landing:
    """Where one version arrives."""

    stage: Callable[[SnapshotHeader, SharedMemory], Staging]
    """Holds it in memory that is filled elsewhere, and offers it to peers."""
    discard: Callable[[], None]
    """Forgets what `stage` holds; the version is expected again."""


class Shortcut(Protocol):
    """Brings a version by other means than HTTP, which is there for where it cannot."""

    def __call__(self, http: Transfer, route: Route, landing: Landing) -> VersionTransfer:
        """What is run in place of the transfer over HTTP."""
        ...


class Receiver:
    """Pulls versions along its routes, and relays them to peers through `server` meanwhile.

    `complete` is called in the event loop with each finished version, in ascending order (once more
    after `refetch`); `report` with what each peer sent. Neither may block. At most two snapshots
    are held: the newest complete one, the base of deltas, and the one in progress. A newer version
    supersedes one that is less than half received, but never two in a row. `keep` tells a version
    to hold in place of a newer complete one, which proved unusable; -1: none. `bytes_per_s` caps
    what is read from the network; 0: no cap. With a `shortcut`, it pulls what that cannot bring.
    Raises `ConfigError` if a file of `tls` is invalid.
    """

    def __init__(
        self,
        *,
        job_id: str,
        worker_id: str,
        server: WeightServer,
        report: Callable[[TransferReport], None],
        complete: Callable[[Staging], None],
        keep: Callable[[], int] = lambda: -1,
        metrics: Metrics | None = None,
        tls: TlsSettings | None = None,
        bytes_per_s: float = 0.0,
        shortcut: Shortcut | None = None,
    ) -> None:
        self._shortcut = shortcut
        self._job_id = job_id
        self._worker_id = worker_id
        self._server = server
        self._report = report
        self._complete = complete
        self._keep = keep
        self._metrics = metrics
        self._peer = peer_tls(tls)
        self._rate_limit = RateLimit(bytes_per_s, clock=time.monotonic)
        self._route: Route | None = None  # the newest
        self._superseded_last = False  # the previous version was superseded
        self._latest = -1  # the newest complete version
        self._transfer: VersionTransfer | None = None
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def route(self, route: Route) -> bool:
        """Follow a new route, unless it leads to an older version than the current one.

        False: another publication is held under this version; it is dropped and fetched again.
        """
        if self._route is not None and route.version.version < self._route.version.version:
            return True
        self._route = route
        held = self.held(route.version.version)
        if held is not None and held.complete and not _is_publication(held, route.version):
            log.error("another publication is held", job=self._job_id, version=held.header.version)
            self.refetch(route.version.version)
            return False
        if self._transfer is not None and self._transfer.version == route.version.version:
            self._transfer.reroute(route)
        self._changed.set()
        return True

    @property
    def wanted(self) -> int:
        """The newest version that a route leads to; -1: none yet."""
        return -1 if self._route is None else self._route.version.version

    @property
    def latest(self) -> int:
        """The newest version that is complete; -1: none yet."""
        return self._latest

    def held(self, version: int) -> Staging | None:
        """The snapshot of a version, complete or partial; None if not held."""
        return self._server.held(self._job_id, version)

    def refetch(self, version: int) -> None:
        """Fetch a complete version again because it proved unusable, unless it is outdated."""
        if version == self._latest:
            self._server.drop(self._job_id, version)
            self._latest = version - 1
            self._changed.set()

    def progress(self) -> list[TransferProgress]:
        """Progress of each version held, with the sources of the one in progress."""
        transfer = self._transfer
        current = [transfer.progress()] if transfer is not None else []
        others = [
            p for p in self._server.progress() if not current or p.version != current[0].version
        ]
        return sorted([*others, *current], key=lambda progress: progress.version)

    async def run(self) -> None:
        """Follow the routes until cancelled or closed."""
        self._running = asyncio.current_task()
        while True:
            route = await self._newer_than(lambda: self._latest)
            try:
                await self._follow(route)
            except PacelineError as error:
                version = route.version.version
                log.warning("cannot pull", job=self._job_id, version=version, error=error)
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Stop `run`; a transfer in progress is abandoned."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
            self._running = None

    async def _newer_than(self, version: Callable[[], int]) -> Route:
        while self._route is None or self._route.version.version <= version():
            self._changed.clear()
            await self._changed.wait()
        return self._route

    async def _follow(self, route: Route) -> None:
        """Pull one version, until it is complete, or superseded before half of it is received."""
        version = route.version.version
        if self._base(self._keep()) is not None and self._keep() != self._latest:
            self._server.drop(self._job_id, self._latest)
        self._server.expect(self._job_id, version, key=route.key)
        transfer = self._transfer = self._begin(route)
        pulling = asyncio.create_task(transfer.run(), name="pull")
        newer = asyncio.create_task(self._newer_than(lambda: version), name="newer")
        try:
            await asyncio.wait({pulling, newer}, return_when=asyncio.FIRST_COMPLETED)
            if not (pulling.done() or transfer.is_half_done() or self._superseded_last):
                self._supersede(transfer)
                return
            # Its route is no longer renewed, so the wait for a working peer is bounded.
            transfer.stall_timeout_s = _SUPERSEDED_STALL_TIMEOUT_S
            self._finish(await pulling)
        finally:
            self._transfer = None
            pulling.cancel()
            newer.cancel()
            await asyncio.wait({pulling, newer})
            if not transfer.is_complete():
                self._abandon(transfer)

    def _begin(self, route: Route) -> VersionTransfer:
        version = route.version.version
        http = Transfer(
            route,
            job_id=self._job_id,
            worker_id=self._worker_id,
            stage=lambda header: self._server.stage(header, key=route.key),
            base=self._base,
            held=self._newest,
            report=self._report,
            peer=self._peer,
            metrics=self._metrics,
            pace=self._rate_limit,
            stall_timeout_s=float("inf"),
            is_superseded=lambda: self._is_superseded(version),
        )
        if self._shortcut is None:
            return http

        def discard() -> None:
            self._server.drop(self._job_id, version)
            self._server.expect(self._job_id, version, key=route.key)

        def stage(header: SnapshotHeader, memory: SharedMemory) -> Staging:
            return self._server.stage(header, key=route.key, memory=memory)

        return self._shortcut(http, route, Landing(stage, discard))

    def _is_superseded(self, version: int) -> bool:
        return self._route is not None and self._route.version.version > version

    def _base(self, version: int) -> Staging | None:
        found = self.held(version)
        return found if found is not None and found.complete else None

    def _newest(self) -> Staging | None:
        found = self._base(self._latest) or self._base(self._keep())
        return found if found is not None and found.header.frozen_bytes else None

    def _finish(self, staging: Staging) -> None:
        version = staging.header.version
        self._latest, self._superseded_last = version, False
        log.info("weights received", job=self._job_id, version=version)
        if self._metrics is not None:
            self._metrics.set("weight_version", version, job=self._job_id, state="held")
        self._complete(staging)

    def _supersede(self, transfer: VersionTransfer) -> None:
        self._superseded_last = True  # a worker slower than publications would never finish
        log.info("superseded", job=self._job_id, version=transfer.version, ready=transfer.num_ready)
        if self._metrics is not None:
            self._metrics.add("weight_events", job=self._job_id, event="superseded")

    def _abandon(self, transfer: VersionTransfer) -> None:
        if transfer.staging is not None:
            transfer.staging.abandon()
        self._server.drop(self._job_id, transfer.version)


def _is_publication(held: Staging, version: PolicyVersion) -> bool:
    """Whether a complete snapshot is this publication; digest and incarnation may be unknown."""
    header = held.header
    if header.step != version.step or version.digest not in {"", held.root}:
        return False
    return 0 in {header.incarnation, version.incarnation} or (
        header.incarnation == version.incarnation
    )
