"""Keeps an engine at the newest policy version: routes, swaps, canaries."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from paceline.config.service import TlsSettings
from paceline.errors import DeadlineError, PacelineError, StateError
from paceline.interfaces import Engine
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.rpc import backoff_s, stream
from paceline.tracing import OFF, Span, Tracer, step_context
from paceline.types import PolicyVersion
from paceline.v1 import roster_pb2 as pb
from paceline.weights.manifest import Header
from paceline.weights.receiver import Receiver
from paceline.weights.route import TransferProgress
from paceline.weights.server import WeightServer
from paceline.weights.staging import Staging
from paceline.weights.wire import route_from
from paceline_rollout.reports import Reports

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

WATCH_S = 3600.0
NONE = PolicyVersion(version=-1, step=-1)
OnChange = Callable[[bool], Awaitable[None]]
log = Log("rollout")


class Follower:
    """Follows the routes of one worker; a receiver pulls while the engine goes on.

    `changed(True)` is awaited after a version is active and its canary agrees, `changed(False)`
    when a canary disagrees; that version is then pulled and loaded again.
    """

    def __init__(
        self,
        *,
        roster: RosterAsyncStub,
        engine: Engine,
        server: WeightServer,
        job_id: str,
        worker_id: str,
        activation: str,
        canary_tolerance: float,
        metrics: Metrics,
        changed: OnChange,
        tls: TlsSettings | None = None,
        bytes_per_s: float = 0.0,
        tracer: Tracer = OFF,
    ) -> None:
        self.active = NONE
        self.newest = NONE  # that this worker was told of
        self.canary_error = 0.0
        self._active_since: float | None = None
        self._roster = roster
        self._engine = engine
        self._job_id = job_id
        self._worker_id = worker_id
        self._activation = activation
        self._tolerance = canary_tolerance
        self._metrics = metrics
        self._changed = changed
        self._failures = 0
        self._tracer = tracer
        self._routed: dict[int, int] = {}  # version -> when this worker was sent for it
        self._reports = Reports(roster, job_id=job_id)
        self._arrived: asyncio.Queue[Staging] = asyncio.Queue()
        self._receiver = Receiver(
            job_id=job_id,
            worker_id=worker_id,
            server=server,
            report=self._reports.add,
            complete=self._arrived.put_nowait,
            metrics=metrics,
            tls=tls,
            bytes_per_s=bytes_per_s,
        )

    @property
    def lag(self) -> int:
        """Versions between the active one and the newest it was sent for."""
        return max(self._receiver.wanted - self.active.version, 0)

    @property
    def age_s(self) -> float:
        """Since the active version became so; not a number before the first one."""
        return math.nan if self._active_since is None else time.monotonic() - self._active_since

    def progress(self) -> list[TransferProgress]:
        """What this worker can serve to peers."""
        return self._receiver.progress()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="route")
            group.create_task(self._receiver.run(), name="receive")
            group.create_task(self._reports.run(), name="report")
            while True:
                # The engine lets a newer version displace one that still waits for its moment.
                staging = await self._arrived.get()
                group.create_task(self._activate(staging), name="activate")
                del staging  # a snapshot that nobody holds gives its memory to the next one

    async def _watch(self) -> None:
        request = pb.WatchRouteRequest(job_id=self._job_id, worker_id=self._worker_id)
        attempt = 0
        while True:
            try:
                async for route in stream(self._roster.WatchRoute, request, timeout_s=WATCH_S):
                    attempt = 0
                    found = route_from(route)
                    self._routed.setdefault(found.version.version, self._tracer.now())
                    self.newest = found.version
                    if not self._receiver.route(found) and self.active.version >= 0:
                        await self._changed(False)
            except DeadlineError:
                continue
            except PacelineError as error:
                log.warning("no route", job=self._job_id, error=error)
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    async def _activate(self, staging: Staging) -> None:
        header = staging.header
        started = asyncio.get_running_loop().time()
        span = self._received(header)
        try:
            with span.child("weights.swap", worker=self._worker_id, version=header.version):
                await self._engine.load(staging, self._activation)
                error = await self._check(header)
        except StateError as error:
            log.info("not loaded", job=self._job_id, version=header.version, error=error)
            return
        except PacelineError as error:
            log.error("cannot load", job=self._job_id, version=header.version, error=error)
            await self._retry(header)
            return
        took = asyncio.get_running_loop().time() - started
        self._metrics.add("weight_seconds", took, job=self._job_id, stage="swap")
        self.canary_error = error
        if not error <= self._tolerance:
            log.error(
                "canary disagrees",
                job=self._job_id,
                version=header.version,
                canary_error=error,
                allowed=self._tolerance,
            )
            await self._retry(header)
            return
        await self._accept(staging)

    def _received(self, header: Header) -> Span:
        """The trace of the step that made a version; what it took to get here is told in it."""
        context = step_context(self._job_id, header.incarnation, header.step)
        span = self._tracer.below(context)
        routed = self._routed.get(header.version, self._tracer.now())
        span.past("weights.receive", routed, worker=self._worker_id, version=header.version)
        self._routed = {v: at for v, at in self._routed.items() if v > header.version}
        return span

    async def _accept(self, staging: Staging) -> None:
        header = staging.header
        if header.version < self.active.version:
            return
        self._failures = 0
        self._active_since = time.monotonic()
        self.active = PolicyVersion(
            version=header.version,
            step=header.step,
            parent=header.parent_version,
            incarnation=header.incarnation,
            digest=staging.root,
            num_bytes=header.num_bytes,
        )
        self._metrics.set("weight_version", header.version, job=self._job_id, state="active")
        log.info("active", job=self._job_id, version=header.version, step=header.step)
        await self._changed(True)

    async def _check(self, header: Header) -> float:
        """Largest difference of the canary's log-probs; infinite if one is not a number."""
        if len(header.canary_tokens) < 2:
            return 0.0
        got = await self._engine.score(header.canary_tokens)
        if self._engine.status().version != header.version:
            raise StateError(f"version {header.version} was replaced before its canary ran")
        pairs = zip(got, header.canary_logprobs, strict=True)
        worst = max(abs(mine - theirs) for mine, theirs in pairs)
        return math.inf if any(math.isnan(x) for x in got) else worst

    async def _retry(self, header: Header) -> None:
        """Serve nothing and fetch this version again, unless a newer one is on its way."""
        await self._changed(False)
        self._failures += 1
        await asyncio.sleep(backoff_s(self._failures))
        self._receiver.again(header.version)
