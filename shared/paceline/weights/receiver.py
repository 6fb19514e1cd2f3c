"""Keeps one worker at the newest version of a job's weights, by the routes that it is given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paceline.config.service import TlsSettings
from paceline.errors import PacelineError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.types import PolicyVersion
from paceline.weights.pace import Pace
from paceline.weights.route import Route, TransferProgress, TransferReport
from paceline.weights.server import WeightServer
from paceline.weights.staging import Staging
from paceline.weights.stream import secure
from paceline.weights.transfer import Transfer

log = Log("weights")

_RETRY_S = 0.5
_LAST_PATIENCE_S = 2.0


class Receiver:
    """Pulls what the routes say, and offers it to peers through `server` as it comes.

    `complete` is called in the event loop with each finished version, in ascending order (and once
    more after `again`); `report` with what came from whom. Neither may block. At most two
    snapshots are held: the newest whole one, against which differences are asked for, and the one
    under way. A version of which less than half is here is superseded by a newer one, but never two
    on end. `bytes_per_s` caps what is taken from the network; 0: no cap. Raises `ConfigError`
    when a file of `tls` is wrong.
    """

    def __init__(
        self,
        *,
        job_id: str,
        worker_id: str,
        server: WeightServer,
        report: Callable[[TransferReport], None],
        complete: Callable[[Staging], None],
        metrics: Metrics | None = None,
        tls: TlsSettings | None = None,
        bytes_per_s: float = 0.0,
    ) -> None:
        self._job_id = job_id
        self._worker_id = worker_id
        self._server = server
        self._report = report
        self._complete = complete
        self._metrics = metrics
        self._peer = secure(tls)
        self._pace = Pace(bytes_per_s, clock=time.monotonic)
        self._route: Route | None = None  # the newest
        self._skipped = False  # the version before was superseded
        self._have = -1  # the newest version that is whole
        self._transfer: Transfer | None = None
        self._news = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def route(self, route: Route) -> bool:
        """Go by this route from here on; one to an older version than another was is ignored.

        False: what is held under its number is another publication; it is dropped and fetched anew.
        """
        if self._route is not None and route.version.version < self._route.version.version:
            return True
        self._route = route
        held = self._server.held(self._job_id, route.version.version)
        if held is not None and held.complete and not _is_of(held, route.version):
            log.error("held another publication", job=self._job_id, version=held.header.version)
            self.again(route.version.version)
            return False
        if self._transfer is not None and self._transfer.version == route.version.version:
            self._transfer.reroute(route)
        self._news.set()
        return True

    @property
    def wanted(self) -> int:
        """The newest version that a route has sent it for; -1: none yet."""
        return -1 if self._route is None else self._route.version.version

    def again(self, version: int) -> None:
        """Fetch a version once more, which was whole but did not work; unless a newer one is."""
        if version == self._have:
            self._server.drop(self._job_id, version)
            self._have = version - 1
            self._news.set()

    def progress(self) -> list[TransferProgress]:
        """How much there is of each version held, and where the one under way comes from."""
        transfer = self._transfer
        mine = [transfer.progress()] if transfer is not None else []
        others = [p for p in self._server.progress() if not mine or p.version != mine[0].version]
        return sorted([*others, *mine], key=lambda progress: progress.version)

    async def run(self) -> None:
        """Follow the routes until cancelled or closed."""
        self._running = asyncio.current_task()
        while True:
            route = await self._newer_than(lambda: self._have)
            try:
                await self._follow(route)
            except PacelineError as error:
                version = route.version.version
                log.warning("cannot pull", job=self._job_id, version=version, error=error)
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """End `run`; what is under way is abandoned."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
            self._running = None

    async def _newer_than(self, version: Callable[[], int]) -> Route:
        while self._route is None or self._route.version.version <= version():
            self._news.clear()
            await self._news.wait()
        return self._route

    async def _follow(self, route: Route) -> None:
        """One version, until it is whole, or superseded before half of it was here."""
        version = route.version.version
        self._server.expect(self._job_id, version, key=route.key)
        transfer = self._transfer = Transfer(
            route,
            job_id=self._job_id,
            worker_id=self._worker_id,
            into=lambda header: self._server.stage(header, key=route.key),
            base=self._base,
            report=self._report,
            peer=self._peer,
            metrics=self._metrics,
            pace=self._pace,
            patience_s=float("inf"),
            is_old=lambda: self._is_old(version),
        )
        pulling = asyncio.create_task(transfer.run(), name="pull")
        newer = asyncio.create_task(self._newer_than(lambda: version), name="newer")
        try:
            await asyncio.wait({pulling, newer}, return_when=asyncio.FIRST_COMPLETED)
            if not (pulling.done() or transfer.is_half() or self._skipped):
                self._superseded(transfer)
                return
            # Its route is not renewed any more, so that patience has an end.
            transfer.patience_s = _LAST_PATIENCE_S
            self._whole(await pulling)
        finally:
            self._transfer = None
            pulling.cancel()
            newer.cancel()
            await asyncio.wait({pulling, newer})
            if not transfer.is_complete():
                self._abandon(transfer)

    def _is_old(self, version: int) -> bool:
        return self._route is not None and self._route.version.version > version

    def _base(self, version: int) -> Staging | None:
        found = self._server.held(self._job_id, version)
        return found if found is not None and found.complete else None

    def _whole(self, staging: Staging) -> None:
        version = staging.header.version
        self._have, self._skipped = version, False
        log.info("weights are here", job=self._job_id, version=version)
        if self._metrics is not None:
            self._metrics.set("weight_version", version, job=self._job_id, state="held")
        self._complete(staging)

    def _superseded(self, transfer: Transfer) -> None:
        self._skipped = True  # else one that is slower than the publications would never have any
        log.info("superseded", job=self._job_id, version=transfer.version, ready=transfer.num_ready)
        if self._metrics is not None:
            self._metrics.add("weight_events", job=self._job_id, event="superseded")

    def _abandon(self, transfer: Transfer) -> None:
        if transfer.staging is not None:
            transfer.staging.abandon()
        self._server.drop(self._job_id, transfer.version)


def _is_of(held: Staging, version: PolicyVersion) -> bool:
    """Whether a snapshot is the publication; its digest is known when all of it was staged."""
    header = held.header
    if header.step != version.step or version.digest not in {"", held.root}:
        return False
    return 0 in {header.incarnation, version.incarnation} or (
        header.incarnation == version.incarnation
    )
