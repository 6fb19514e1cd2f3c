"""Brings one version through the memory of a sender on this machine, else over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paceline.errors import (
    IntegrityError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
    VersionGoneError,
)
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.weights.route import Route, TransferEvent, TransferProgress, TransferReport
from paceline.weights.shared_memory.borrower import borrow
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.memory import SharedMemory
from paceline.weights.snapshot.staging import Staging
from paceline.weights.transfer.version_receiver import Landing
from paceline.weights.transfer.version_transfer import Transfer

_NOT_FOUND_GRACE_S = 1.0  # a lender may learn of a version after this process
_RETRY_S = 0.02
_LENDER_ERRORS = (
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
    VersionGoneError,
)
log = Log("weights")


class MappedTransfer:
    """Asks the sources and fallbacks of its route for their memory, once each.

    If none lends it to the end, the version comes over HTTP, from its beginning.
    """

    def __init__(
        self,
        http: Transfer,
        route: Route,
        landing: Landing,
        *,
        job_id: str,
        worker_id: str,
        report: Callable[[TransferReport], None],
        metrics: Metrics | None = None,
    ) -> None:
        self._http = http
        self._route = route
        self._landing = landing
        self._job_id = job_id
        self._worker_id = worker_id
        self._report = report
        self._metrics = metrics
        self._mapped: Staging | None = None
        self._lender = ""  # its endpoint, while it lends
        self._by_http = False
        self.stall_timeout_s = http.stall_timeout_s

    @property
    def version(self) -> int:
        """The version being transferred."""
        return self._http.version

    @property
    def staging(self) -> Staging | None:
        """What has arrived of it; None: nothing."""
        return self._http.staging if self._by_http else self._mapped

    @property
    def num_ready(self) -> int:
        """Number of chunks received."""
        return self.staging.num_ready if self.staging else 0

    def is_complete(self) -> bool:
        """Whether all chunks are received."""
        return self.staging is not None and self.staging.complete

    def is_half_done(self) -> bool:
        """Whether at least half of the chunks are received."""
        staging = self.staging
        return staging is not None and 2 * staging.num_ready >= staging.header.num_chunks

    def progress(self) -> TransferProgress:
        """Chunks received so far, and the current sources."""
        if self._by_http:
            return self._http.progress()
        num_chunks = self._mapped.header.num_chunks if self._mapped else 0
        sources = (self._lender,) if self._lender else ()
        return TransferProgress(self.version, self.num_ready, num_chunks, sources)

    def reroute(self, route: Route) -> None:
        """Ask the sources of another route from now on."""
        self._route = route
        self._http.reroute(route)

    async def run(self) -> Staging:
        """Run until the snapshot is complete; raises when no source makes progress."""
        staging = await self._borrowed()
        if staging is not None:
            return staging
        self._by_http = True
        self._http.stall_timeout_s = self.stall_timeout_s
        return await self._http.run()

    async def _borrowed(self) -> Staging | None:
        """The version in lent memory; None: nobody lends it."""
        started_s, failed, reason = time.monotonic(), set[str](), ""
        while left := [endpoint for endpoint in self._candidates() if endpoint not in failed]:
            for endpoint in left:
                try:
                    return await self._borrow(endpoint)
                except _LENDER_ERRORS as error:
                    reason = str(error)
                    self._discard(endpoint, error)
                    late = time.monotonic() - started_s > _NOT_FOUND_GRACE_S
                    if late or not isinstance(error, NotFoundError):
                        failed.add(endpoint)
            await asyncio.sleep(_RETRY_S)
        log.info("weights come over HTTP", job=self._job_id, version=self.version, why=reason)
        return None

    def _candidates(self) -> list[str]:
        sources = [source.endpoint for source in self._route.sources]
        return [
            endpoint for endpoint in dict.fromkeys([*sources, *self._route.fallbacks]) if endpoint
        ]

    async def _borrow(self, endpoint: str) -> Staging:
        started_s = time.monotonic()

        def stage(header: SnapshotHeader, memory: SharedMemory) -> Staging:
            self._lender = endpoint
            self._mapped = self._landing.stage(header, memory)
            return self._mapped

        staging = await borrow(
            endpoint,
            job_id=self._job_id,
            version=self.version,
            key=self._route.key,
            stage=stage,
        )
        if self._metrics is not None:
            took_s = time.monotonic() - started_s
            self._metrics.add("weight_seconds", took_s, job=self._job_id, stage="pull")
            moved = {"direction": "in", "kind": "shared"}
            self._metrics.add("weight_bytes", staging.header.num_bytes, job=self._job_id, **moved)
        self._send_report(endpoint, TransferEvent.DONE)
        return staging

    def _discard(self, endpoint: str, error: PacelineError) -> None:
        if isinstance(error, IntegrityError):
            log.warning("lent memory is damaged", job=self._job_id, endpoint=endpoint, error=error)
            self._send_report(endpoint, TransferEvent.DAMAGED, str(error))
        if self._mapped is not None:
            self._mapped, self._lender = None, ""
            self._landing.discard()

    def _send_report(self, endpoint: str, event: TransferEvent, detail: str = "") -> None:
        """Nothing was on the network, so that no link is measured by it."""
        staging = self._mapped
        if self._metrics is not None and event is TransferEvent.DAMAGED:
            self._metrics.add("weight_events", job=self._job_id, event=event)
        self._report(
            TransferReport(
                worker_id=self._worker_id,
                version=self.version,
                endpoint=endpoint,
                event=event,
                num_ready=staging.num_ready if staging else 0,
                num_chunks=staging.header.num_chunks if staging else 0,
                detail=detail,
            )
        )
