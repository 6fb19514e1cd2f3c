"""Transfers one version from several peers in parallel, with fallbacks for those that fail.

Decides which peer to ask for which chunks; `stream/chunk_reader.py` receives and verifies them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NoReturn
from urllib.parse import quote

from paceline.config.service import TlsSettings
from paceline.errors import (
    DeadlineError,
    IntegrityError,
    InvalidError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
    VersionGoneError,
)
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.types import PolicyVersion
from paceline.weights.route import (
    ChunkSource,
    Route,
    TransferEvent,
    TransferProgress,
    TransferReport,
)
from paceline.weights.snapshot.manifest import SnapshotHeader, header_to_proto
from paceline.weights.snapshot.staging import Staging
from paceline.weights.snapshot.verification import SnapshotAuthenticator, pull_token
from paceline.weights.stream.chunk_reader import ChunkReader, HeldDiffersError
from paceline.weights.stream.frames import ChunkRequest, HeaderFrame, bitmap, request_body
from paceline.weights.stream.http import Ended, PeerTls, Response, Stalled, peer_tls, post
from paceline.weights.stream.rate_limit import RateLimit
from paceline.weights.transfer.countdown import Countdown, running_timeout
from paceline.weights.transfer.peers import Peers

log = Log("weights")

_STALL_TIMEOUT_S = 1.0  # without progress, while all peers fail
_NOT_FOUND_GRACE_S = 1.0  # a peer may learn of a version after this process
_NOT_FOUND_RETRY_S = 0.02
_TICK_S = 0.1
_REPORT_INTERVAL_S = 1.0
_SUPERSEDE_GRACE_S = 1.0  # for a newer version to become known

_PEER_ERRORS = (
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    VersionGoneError,
)


class Transfer:
    """The transfer of one version.

    Each source sends its share of the chunks; when it fails, another peer sends those that are
    missing. `stage` is called once, with the header. `base` returns a complete version to request
    deltas against, or None; `held` the newest complete one, whose frozen bytes need not be sent.
    `report` is called with what each peer sent and must not block. Peers drop a version once a
    newer one is published, so a peer that ends a stream is reported as failed only if
    `is_superseded` is false a moment later, or is not given. The transfer fails after
    `stall_timeout_s` without progress while all peers fail. Only time in which this process ran
    counts against a peer.
    """

    def __init__(
        self,
        route: Route,
        *,
        job_id: str,
        stage: Callable[[SnapshotHeader], Staging],
        worker_id: str = "",
        base: Callable[[int], Staging | None] = lambda _: None,
        held: Callable[[], Staging | None] = lambda: None,
        report: Callable[[TransferReport], None] = lambda _: None,
        peer: PeerTls | None = None,
        metrics: Metrics | None = None,
        pace: RateLimit | None = None,
        stall_timeout_s: float = _STALL_TIMEOUT_S,
        is_superseded: Callable[[], bool] | None = None,
    ) -> None:
        self.staging: Staging | None = None
        self._route = route
        self._job_id = job_id
        self._worker_id = worker_id
        self._stage = stage
        self._base = base
        self._held = held
        self._uses_held = True
        self._report = report
        self._secure = peer
        self._metrics = metrics
        self._pace = pace or RateLimit(0.0, clock=time.monotonic)
        self.stall_timeout_s = stall_timeout_s
        self._is_superseded = is_superseded
        self._peers = Peers()
        self._shares: dict[ChunkSource, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._started_s = time.monotonic()
        self._reported_s = self._started_s
        self._ran_s = 0.0  # in ticks, so that a suspension of this process does not count
        self._spent_s = {"decode": 0.0, "digest": 0.0}

    @property
    def version(self) -> int:
        """The version being transferred."""
        return self._route.version.version

    @property
    def num_ready(self) -> int:
        """Number of chunks received."""
        return self.staging.num_ready if self.staging else 0

    def is_complete(self) -> bool:
        """Whether all chunks are received."""
        return self.staging is not None and self.staging.complete

    def is_half_done(self) -> bool:
        """Whether at least half of the chunks are received."""
        found = self.staging
        return found is not None and 2 * found.num_ready >= found.header.num_chunks

    def progress(self) -> TransferProgress:
        """Chunks received so far, and the current sources."""
        found = self.staging
        sources = sorted({endpoint for endpoint, _ in self._peers.streams()})
        num_chunks = found.header.num_chunks if found else 0
        return TransferProgress(self.version, self.num_ready, num_chunks, tuple(sources))

    def reroute(self, route: Route) -> None:
        """Continue by another route to the same version; streams of sources in both are kept."""
        if route.sources != self._route.sources:
            self._peers.reset_backoff()
        self._route = route
        self._changed.set()

    async def run(self) -> Staging:
        """Run until the snapshot is complete.

        Raises `IntegrityError` or `UnavailableError` when no peer makes progress.
        """
        monitor = asyncio.create_task(self._monitor(), name="monitor")
        try:
            while self.staging is None or not self.staging.complete:
                self._changed.clear()
                await self._start()
                await self._wait_for_change()
            self._record_timings()
            return self.staging
        finally:
            await _cancel([monitor, *self._shares.values()])

    async def _wait_for_change(self) -> None:
        """Wait until a share is done or has failed, or the route has changed."""
        changed = asyncio.create_task(self._changed.wait(), name="changed")
        try:
            self._raise_failed()  # one may have failed while `_start` waited for another to end
            open_shares = {task for task in self._shares.values() if not task.done()}
            await asyncio.wait({changed, *open_shares}, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failed()
        finally:
            changed.cancel()

    def _raise_failed(self) -> None:
        """Raise the exception of a failed share."""
        for task in self._shares.values():
            if task.done():
                task.result()

    async def _start(self) -> None:
        wanted = _complete_shares(self._route.sources)
        # Awaited before others request the same chunks: a slot must have one writer.
        await _cancel([self._shares.pop(share) for share in set(self._shares) - set(wanted)])
        for share in wanted:
            if share not in self._shares:
                self._shares[share] = asyncio.create_task(self._fetch(share), name="share")

    async def _fetch(self, share: ChunkSource) -> None:
        progress_s, num_ready = self._ran_s, self.num_ready
        while self._missing(share):
            endpoint = self._peers.next(share, self._candidates(share))
            if endpoint is not None:
                await self._attempt(endpoint, share)
            if self.num_ready > num_ready:
                progress_s, num_ready = self._ran_s, self.num_ready
            elif self._ran_s - progress_s > self.stall_timeout_s and self._all_failed(share):
                self._give_up()
            if endpoint is None:
                await asyncio.sleep(self._peers.next_retry_s(share))

    def _all_failed(self, share: ChunkSource) -> bool:
        return all(self._peers[endpoint].error for endpoint in self._candidates(share))

    def _missing(self, share: ChunkSource) -> bool:
        return self.staging is None or bool(self._wanted(share))

    def _wanted(self, share: ChunkSource) -> list[int]:
        assert self.staging is not None
        in_share = range(share.part, self.staging.header.num_chunks, share.parts)
        return [index for index in in_share if not self.staging.is_ready(index)]

    def _candidates(self, share: ChunkSource) -> list[str]:
        others = [source.endpoint for source in self._route.sources]
        found = [share.endpoint, *self._route.fallbacks, *others]
        return [endpoint for endpoint in dict.fromkeys(found) if endpoint]

    async def _attempt(self, endpoint: str, share: ChunkSource) -> None:
        peer = self._peers[endpoint]
        reader = ChunkReader(clock=time.monotonic, pace=self._pace)
        peer.readers.add(reader)
        try:
            await self._fetch_from(endpoint, share, reader)
            event = TransferEvent.DONE if self.is_complete() else TransferEvent.MOVED
            self._report(self._make_report(endpoint, event, reader))
        except asyncio.CancelledError:
            self._report(self._make_report(endpoint, TransferEvent.MOVED, reader))
            raise
        except NotFoundError as error:
            if self._ran_s > _NOT_FOUND_GRACE_S:
                self._handle_failure(endpoint, reader, error)
            else:
                peer.error = str(error)
                await asyncio.sleep(_NOT_FOUND_RETRY_S)
        except HeldDiffersError as error:
            self._uses_held = False
            log.warning("frozen weights differ", job=self._job_id, version=self.version, why=error)
        except _PEER_ERRORS as error:
            self._handle_failure(endpoint, reader, error)
        finally:
            reader.close()
            peer.readers.discard(reader)

    def _handle_failure(self, endpoint: str, reader: ChunkReader, error: PacelineError) -> None:
        damaged = isinstance(error, IntegrityError)
        self._peers[endpoint].failed(str(error), damaged=damaged)
        event = TransferEvent.DAMAGED if damaged else TransferEvent.FAILED
        if isinstance(error, Stalled):
            event = TransferEvent.STALLED
        log.warning(
            f"peer {event}",
            job=self._job_id,
            version=self.version,
            endpoint=endpoint,
            ready=self.num_ready,
            error=str(error),
        )
        detail = str(error)
        if isinstance(error, VersionGoneError):
            self._report(self._make_report(endpoint, TransferEvent.MOVED, reader, detail))
        elif isinstance(error, Ended) and self._is_superseded is not None:
            self._report(self._make_report(endpoint, TransferEvent.MOVED, reader))
            self._report_unless_superseded(
                self._is_superseded, self._make_report(endpoint, event, reader, detail)
            )
        else:
            self._count(event)
            self._report(self._make_report(endpoint, event, reader, detail))

    def _report_unless_superseded(
        self, is_superseded: Callable[[], bool], report: TransferReport
    ) -> None:
        """Report a failure after a moment, holding no reference to the snapshot meanwhile."""
        send, metrics, job_id = self._report, self._metrics, self._job_id

        def send_report() -> None:
            if not is_superseded():
                if metrics is not None:
                    metrics.add("weight_events", job=job_id, event=report.event)
                send(report)

        Countdown(_SUPERSEDE_GRACE_S, send_report)

    async def _fetch_from(self, endpoint: str, share: ChunkSource, reader: ChunkReader) -> None:
        base = self._base(self._route.base_version) if self._route.base_version >= 0 else None
        held = self._held() if self._uses_held else None
        response = await self._connect(endpoint, share, base, held)
        staging = self._open(await reader.open(response))
        holds_all = await reader.receive(staging, self._wanted(share), base=base, held=held)
        if self._wanted(share):
            why = f"weights: {endpoint} does not hold all requested chunks"
            if holds_all:
                raise UnavailableError(why)
            self._peers[endpoint].mark_missing(share, why)

    async def _connect(
        self, endpoint: str, share: ChunkSource, base: Staging | None, held: Staging | None
    ) -> Response:
        wanted = b""
        if self.staging is not None and self.num_ready:
            wanted = bitmap(self._wanted(share), self.staging.header.num_chunks)
        versions = (each.header.version if each else None for each in (base, held))
        request = ChunkRequest(wanted, share.part, share.parts, *versions)
        path = f"/weights/{quote(self._job_id, safe='')}/{self.version}"
        token = pull_token(self._route.key) if self._route.key else ""
        try:
            async with running_timeout(self._peers[endpoint].connect_s):
                return await post(
                    endpoint, path, request_body(request), token=token, peer=self._secure
                )
        except TimeoutError:
            raise Stalled(f"weights: {endpoint} does not answer") from None

    def _open(self, frame: HeaderFrame) -> Staging:
        header = frame.header
        if (header.job_id, header.version) != (self._job_id, self.version):
            raise IntegrityError(
                f"weights: requested version {self.version} of {self._job_id}, "
                f"got {header.version} of {header.job_id}"
            )
        SnapshotAuthenticator(header, self._route.key).check_header(frame.authentication)
        if self.staging is None:
            self.staging = self._stage(header)
            if self.staging.key != self._route.key:
                raise StateError("weights: transfer and staging have different keys")
            if header.num_chunks == 0:
                self.staging.finish()
        elif header_to_proto(self.staging.header) != header_to_proto(header):
            raise IntegrityError(f"weights: two headers of version {self.version} differ")
        return self.staging

    async def _monitor(self) -> None:
        """Close stalled streams, and report on the others at intervals."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._ran_s += _TICK_S
            now = time.monotonic()
            is_due = now - self._reported_s >= _REPORT_INTERVAL_S
            self._reported_s = now if is_due else self._reported_s
            for endpoint, reader in self._peers.streams():
                if reader.check_progress(self._expected_s(), _TICK_S):
                    log.warning("peer slow", job=self._job_id, endpoint=endpoint)
                    self._count(TransferEvent.SLOW)
                    self._report(self._make_report(endpoint, TransferEvent.SLOW, reader))
                elif is_due and reader.counts.num_bytes:
                    self._report(self._make_report(endpoint, TransferEvent.MOVED, reader))

    def _expected_s(self) -> float:
        """Expected seconds per chunk from one source; 0: unknown."""
        if self.staging is None or self._route.bytes_per_s <= 0:
            return 0.0
        share = self._route.bytes_per_s / max(len(self._route.sources), 1)
        return self.staging.header.chunk_bytes / share

    def _make_report(
        self, endpoint: str, event: TransferEvent, reader: ChunkReader, detail: str = ""
    ) -> TransferReport:
        counts = reader.take()
        self._spent_s["decode"] += counts.decode_s
        self._spent_s["digest"] += counts.verify_s
        if self._metrics is not None:
            for kind, size in (("full", counts.full_bytes), ("delta", counts.delta_bytes)):
                self._metrics.add("weight_bytes", size, job=self._job_id, direction="in", kind=kind)
        return TransferReport(
            worker_id=self._worker_id,
            version=self.version,
            endpoint=endpoint,
            event=event,
            num_bytes=counts.num_bytes,
            wire_bytes=counts.wire_bytes,
            busy_s=counts.busy_s,
            latency_s=reader.latency_s,
            num_ready=self.num_ready,
            num_chunks=self.staging.header.num_chunks if self.staging else 0,
            base_version=self._route.base_version if counts.delta_bytes else -1,
            detail=detail,
        )

    def _count(self, event: str) -> None:
        if self._metrics is not None:
            self._metrics.add("weight_events", job=self._job_id, event=event)

    def _record_timings(self) -> None:
        if self._metrics is not None:
            spent_s = {"pull": time.monotonic() - self._started_s, **self._spent_s}
            for stage, seconds in spent_s.items():
                self._metrics.add("weight_seconds", seconds, job=self._job_id, stage=stage)

    def _give_up(self) -> NoReturn:
        errors = "; ".join(self._peers.errors()) or "no endpoint"
        raise (IntegrityError if self._peers.any_damaged() else UnavailableError)(
            f"weights: version {self.version} of {self._job_id}: {errors}"
        )


def _complete_shares(sources: Sequence[ChunkSource]) -> list[ChunkSource]:
    """The sources, plus one without an endpoint for each part that none of them covers."""
    parts = {source.parts for source in sources} or {1}
    covered = {source.part for source in sources}
    (num_parts,) = parts if len(parts) == 1 else (0,)
    if num_parts < 1 or not covered <= set(range(num_parts)) or len(covered) < len(sources):
        raise InvalidError(f"weights: sources {sources} do not partition the chunks")
    rest = [ChunkSource("", part, num_parts) for part in range(num_parts) if part not in covered]
    return [*sources, *rest]


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def pull(
    endpoints: Sequence[str],
    *,
    job_id: str,
    version: int,
    stage: Callable[[SnapshotHeader], Staging],
    timeout_s: float,
    key: bytes = b"",
    tls: TlsSettings | None = None,
) -> Staging:
    """Pull a version from the first endpoint that works.

    `stage` is called once, with the header. When an endpoint fails midway, the next one
    continues with the missing chunks. Raises `IntegrityError`, `UnavailableError` or
    `DeadlineError` and abandons the staging. With `tls` both sides are verified, and endpoints
    that are not https:// are refused.
    """
    route = Route(
        PolicyVersion(version=version, step=-1),
        tuple(ChunkSource(endpoint) for endpoint in endpoints[:1]),
        fallbacks=tuple(endpoints[1:]),
        key=key,
    )
    transfer = Transfer(route, job_id=job_id, stage=stage, peer=peer_tls(tls))
    try:
        async with asyncio.timeout(timeout_s):
            return await transfer.run()
    except TimeoutError:
        raise DeadlineError(
            f"weights: version {version} did not arrive in {timeout_s} s"
            f" ({transfer.num_ready} chunks did)"
        ) from None
    finally:
        if transfer.staging is not None and not transfer.staging.complete:
            transfer.staging.abandon()
