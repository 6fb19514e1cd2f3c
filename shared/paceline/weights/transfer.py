"""Fetches one version from several peers at once, and from others what these fail to give."""

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
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.types import PolicyVersion
from paceline.weights.countdown import Countdown, at_most
from paceline.weights.frames import HeaderFrame, Request, bitmap, request_body
from paceline.weights.inlet import Inlet
from paceline.weights.manifest import Header, header_to
from paceline.weights.pace import Pace
from paceline.weights.peers import Peers
from paceline.weights.route import Event, Route, Source, TransferProgress, TransferReport
from paceline.weights.seals import Seals, pull_token
from paceline.weights.staging import Staging
from paceline.weights.stream import Ended, Response, Secure, Stalled, post, secure

log = Log("weights")

_PATIENCE_S = 1.0  # without progress, when nobody can be asked
_NOT_YET_S = 1.0  # a peer may learn of a version after us
_NOT_YET_PAUSE_S = 0.02
_TICK_S = 0.1
_TELL_S = 1.0
_GRACE_S = 1.0  # in which a newer version becomes known to all

_Failed = (
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    VersionGoneError,
)


class Transfer:
    """One version on its way.

    Each source gives its part of the chunks; when it fails, another peer goes on with those of
    them that are missing. `into` is called once, with the header, and makes the staging; `base`
    gives a whole version that is held, to ask for differences against it. `report` is told what
    came from whom and must not block. `is_old` tells whether a newer version is out, for which
    peers drop this one: who ends a stream is blamed only if there is none a moment later (at once
    without `is_old`). Nobody is given up before `patience_s` without progress. Only time in which
    this process ran counts against a peer.
    """

    def __init__(
        self,
        route: Route,
        *,
        job_id: str,
        into: Callable[[Header], Staging],
        worker_id: str = "",
        base: Callable[[int], Staging | None] = lambda _: None,
        report: Callable[[TransferReport], None] = lambda _: None,
        peer: Secure | None = None,
        metrics: Metrics | None = None,
        pace: Pace | None = None,
        patience_s: float = _PATIENCE_S,
        is_old: Callable[[], bool] | None = None,
    ) -> None:
        self.staging: Staging | None = None
        self._route = route
        self._job_id = job_id
        self._worker_id = worker_id
        self._into = into
        self._base = base
        self._report = report
        self._secure = peer
        self._metrics = metrics
        self._pace = pace or Pace(0.0, clock=time.monotonic)
        self.patience_s = patience_s
        self._is_old = is_old
        self._peers = Peers()
        self._shares: dict[Source, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._started_s = time.monotonic()
        self._told_s = self._started_s
        self._ran_s = 0.0  # by ticks: without the time for which this process was frozen
        self._spent_s = {"decode": 0.0, "digest": 0.0}

    @property
    def version(self) -> int:
        """Which one."""
        return self._route.version.version

    @property
    def num_ready(self) -> int:
        """Chunks that are here."""
        return self.staging.num_ready if self.staging else 0

    def is_complete(self) -> bool:
        """Whether all chunks are here."""
        return self.staging is not None and self.staging.complete

    def is_half(self) -> bool:
        """Whether at least half of the chunks are."""
        found = self.staging
        return found is not None and 2 * found.num_ready >= found.header.num_chunks

    def progress(self) -> TransferProgress:
        """How far it is."""
        found = self.staging
        sources = sorted({endpoint for endpoint, _ in self._peers.streams()})
        num_chunks = found.header.num_chunks if found else 0
        return TransferProgress(self.version, self.num_ready, num_chunks, tuple(sources))

    def reroute(self, route: Route) -> None:
        """Go on by another route to the same version; sources in both are kept."""
        if route.sources != self._route.sources:
            self._peers.forgive()
        self._route = route
        self._changed.set()

    async def run(self) -> Staging:
        """Until the snapshot is whole.

        Raises `IntegrityError` or `UnavailableError` when nobody gave anything for a while.
        """
        watch = asyncio.create_task(self._watch(), name="watch")
        try:
            while self.staging is None or not self.staging.complete:
                self._changed.clear()
                await self._start()
                await self._any()
            self._observe()
            return self.staging
        finally:
            await _end([watch, *self._shares.values()])

    async def _any(self) -> None:
        """Until a share is done, or has failed, or the route has changed."""
        changed = asyncio.create_task(self._changed.wait(), name="changed")
        try:
            self._look()  # at those too that failed while `_start` waited for another to end
            open_shares = {task for task in self._shares.values() if not task.done()}
            await asyncio.wait({changed, *open_shares}, return_when=asyncio.FIRST_COMPLETED)
            self._look()
        finally:
            changed.cancel()

    def _look(self) -> None:
        """Raise what a share has raised."""
        for task in self._shares.values():
            if task.done():
                task.result()

    async def _start(self) -> None:
        wanted = _shares(self._route.sources)
        # Ended before others ask for the same chunks: two writers of one slot would spoil it.
        await _end([self._shares.pop(share) for share in set(self._shares) - set(wanted)])
        for share in wanted:
            if share not in self._shares:
                self._shares[share] = asyncio.create_task(self._fetch(share), name="share")

    async def _fetch(self, share: Source) -> None:
        moved_s, num_ready = self._ran_s, self.num_ready
        while self._missing(share):
            endpoint = self._peers.next(share, self._candidates(share))
            if endpoint is not None:
                await self._try(endpoint, share)
            if self.num_ready > num_ready:
                moved_s, num_ready = self._ran_s, self.num_ready
            elif self._ran_s - moved_s > self.patience_s and self._all_failed(share):
                self._give_up()
            if endpoint is None:
                await asyncio.sleep(self._peers.pause_s(share))

    def _all_failed(self, share: Source) -> bool:
        return all(self._peers[endpoint].error for endpoint in self._candidates(share))

    def _missing(self, share: Source) -> bool:
        return self.staging is None or bool(self._wanted(share))

    def _wanted(self, share: Source) -> list[int]:
        assert self.staging is not None
        mine = range(share.part, self.staging.header.num_chunks, share.parts)
        return [index for index in mine if not self.staging.is_ready(index)]

    def _candidates(self, share: Source) -> list[str]:
        others = [source.endpoint for source in self._route.sources]
        found = [share.endpoint, *self._route.fallbacks, *others]
        return [endpoint for endpoint in dict.fromkeys(found) if endpoint]

    async def _try(self, endpoint: str, share: Source) -> None:
        peer = self._peers[endpoint]
        inlet = Inlet(clock=time.monotonic, pace=self._pace)
        peer.inlets.add(inlet)
        try:
            await self._from(endpoint, share, inlet)
            self._tell(endpoint, "done" if self.is_complete() else "moved", inlet)
        except asyncio.CancelledError:
            self._tell(endpoint, "moved", inlet)
            raise
        except NotFoundError as error:
            if self._ran_s > _NOT_YET_S:
                self._failed(endpoint, inlet, error)
            else:
                peer.error = str(error)
                await asyncio.sleep(_NOT_YET_PAUSE_S)
        except _Failed as error:
            self._failed(endpoint, inlet, error)
        finally:
            inlet.close()
            peer.inlets.discard(inlet)

    def _failed(self, endpoint: str, inlet: Inlet, error: PacelineError) -> None:
        damaged = isinstance(error, IntegrityError)
        self._peers[endpoint].failed(str(error), damaged=damaged)
        event: Event = "damaged" if damaged else "failed"
        if isinstance(error, Stalled):
            event = "stalled"
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
            self._tell(endpoint, "moved", inlet, detail)
        elif isinstance(error, Ended) and self._is_old is not None:
            self._tell(endpoint, "moved", inlet)
            self._blame_later(self._is_old, self._told(endpoint, event, inlet, detail))
        else:
            self._count(event)
            self._tell(endpoint, event, inlet, detail)

    def _blame_later(self, is_old: Callable[[], bool], report: TransferReport) -> None:
        """Unless a newer version is out by then; what waits for that keeps no snapshot."""
        send, metrics, job_id = self._report, self._metrics, self._job_id

        def blame() -> None:
            if not is_old():
                if metrics is not None:
                    metrics.add("weight_events", job=job_id, event=report.event)
                send(report)

        Countdown(_GRACE_S, blame)

    async def _from(self, endpoint: str, share: Source, inlet: Inlet) -> None:
        base = self._base(self._route.base_version) if self._route.base_version >= 0 else None
        response = await self._connect(endpoint, share, base)
        staging = self._open(await inlet.open(response))
        whole = await inlet.receive(staging, self._wanted(share), base=base)
        if self._wanted(share):
            why = f"weights: {endpoint} does not hold all chunks asked for"
            if whole:
                raise UnavailableError(why)
            self._peers[endpoint].has_not(share, why)

    async def _connect(self, endpoint: str, share: Source, base: Staging | None) -> Response:
        wanted = b""
        if self.staging is not None and self.num_ready:
            wanted = bitmap(self._wanted(share), self.staging.header.num_chunks)
        base_version = base.header.version if base else None
        request = Request(wanted, share.part, share.parts, base_version)
        path = f"/weights/{quote(self._job_id, safe='')}/{self.version}"
        token = pull_token(self._route.key) if self._route.key else ""
        try:
            async with at_most(self._peers[endpoint].connect_s):
                return await post(
                    endpoint, path, request_body(request), token=token, peer=self._secure
                )
        except TimeoutError:
            raise Stalled(f"weights: {endpoint} does not answer") from None

    def _open(self, frame: HeaderFrame) -> Staging:
        header = frame.header
        if (header.job_id, header.version) != (self._job_id, self.version):
            raise IntegrityError(
                f"weights: asked for version {self.version} of {self._job_id}, "
                f"got {header.version} of {header.job_id}"
            )
        Seals(header, self._route.key).check_header(frame.authentication)
        if self.staging is None:
            self.staging = self._into(header)
            if self.staging.key != self._route.key:
                raise StateError("weights: pull and staging were given different keys")
            if header.num_chunks == 0:
                self.staging.finish()
        elif header_to(self.staging.header) != header_to(header):
            raise IntegrityError(f"weights: two headers of version {self.version} differ")
        return self.staging

    async def _watch(self) -> None:
        """Cut the streams from which no byte comes, and tell of the others now and then."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._ran_s += _TICK_S
            now = time.monotonic()
            tell, self._told_s = (
                (True, now) if now - self._told_s >= _TELL_S else (False, self._told_s)
            )
            for endpoint, inlet in self._peers.streams():
                if inlet.look(self._expected_s(), _TICK_S):
                    log.warning("peer slow", job=self._job_id, endpoint=endpoint)
                    self._count("slow")
                    self._tell(endpoint, "slow", inlet)
                elif tell and inlet.counts.num_bytes:
                    self._tell(endpoint, "moved", inlet)

    def _expected_s(self) -> float:
        """Seconds that one chunk should take from one source; 0: unknown."""
        if self.staging is None or self._route.bytes_per_s <= 0:
            return 0.0
        share = self._route.bytes_per_s / max(len(self._route.sources), 1)
        return self.staging.header.chunk_bytes / share

    def _tell(self, endpoint: str, event: Event, inlet: Inlet, detail: str = "") -> None:
        self._report(self._told(endpoint, event, inlet, detail))

    def _told(self, endpoint: str, event: Event, inlet: Inlet, detail: str) -> TransferReport:
        counts = inlet.take()
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
            latency_s=inlet.latency_s,
            num_ready=self.num_ready,
            num_chunks=self.staging.header.num_chunks if self.staging else 0,
            base_version=self._route.base_version if counts.delta_bytes else -1,
            detail=detail,
        )

    def _count(self, event: str) -> None:
        if self._metrics is not None:
            self._metrics.add("weight_events", job=self._job_id, event=event)

    def _observe(self) -> None:
        if self._metrics is not None:
            spent_s = {"pull": time.monotonic() - self._started_s, **self._spent_s}
            for stage, seconds in spent_s.items():
                self._metrics.add("weight_seconds", seconds, job=self._job_id, stage=stage)

    def _give_up(self) -> NoReturn:
        told = "; ".join(self._peers.errors()) or "no endpoint"
        raise (IntegrityError if self._peers.any_damaged() else UnavailableError)(
            f"weights: version {self.version} of {self._job_id}: {told}"
        )


def _shares(sources: Sequence[Source]) -> list[Source]:
    """The sources, and a source without endpoint for each part that none of them has."""
    parts = {source.parts for source in sources} or {1}
    given = {source.part for source in sources}
    (num_parts,) = parts if len(parts) == 1 else (0,)
    if num_parts < 1 or not given <= set(range(num_parts)) or len(given) < len(sources):
        raise InvalidError(f"weights: sources {sources} do not share the chunks out")
    rest = [Source("", part, num_parts) for part in range(num_parts) if part not in given]
    return [*sources, *rest]


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def pull(
    endpoints: Sequence[str],
    *,
    job_id: str,
    version: int,
    into: Callable[[Header], Staging],
    timeout_s: float,
    key: bytes = b"",
    tls: TlsSettings | None = None,
) -> Staging:
    """Fetch a version from the first endpoint that works.

    `into` is called once, with the header, and makes the staging; when an endpoint fails midway
    the next one goes on with the missing chunks. Raises `IntegrityError`, `UnavailableError` or
    `DeadlineError`; what was staged is abandoned then. With `tls` both sides are verified, and
    endpoints that are not https:// are refused.
    """
    route = Route(
        PolicyVersion(version=version, step=-1),
        tuple(Source(endpoint) for endpoint in endpoints[:1]),
        fallbacks=tuple(endpoints[1:]),
        key=key,
    )
    transfer = Transfer(route, job_id=job_id, into=into, peer=secure(tls))
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
