"""Keeps an engine at the newest policy version: route, pull, relay, swap, canary."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from paceline.errors import DeadlineError, PacelineError, StateError
from paceline.interfaces import Engine
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.rpc import backoff_s, stream
from paceline.types import PolicyVersion
from paceline.v1 import roster_pb2 as pb
from paceline.weights import Header, Staging, WeightServer, pull

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

WATCH_S = 3600.0
PULL_S = 600.0
NONE = PolicyVersion(version=-1, step=-1)
OnChange = Callable[[bool], Awaitable[None]]
log = Log("rollout")


class Follower:
    """Follows the route of one worker.

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
    ) -> None:
        self.active = NONE
        self.canary_error = 0.0
        self._roster = roster
        self._engine = engine
        self._server = server
        self._job_id = job_id
        self._worker_id = worker_id
        self._activation = activation
        self._tolerance = canary_tolerance
        self._metrics = metrics
        self._changed = changed
        self._route: pb.Route | None = None
        self._have = -1  # newest version that was pulled
        self._failures = 0
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="route")
            while True:
                route = await self._newer_than(lambda: self._have)
                staging = await self._pull(route)
                if staging is not None:
                    self._have = max(self._have, staging.header.version)
                    group.create_task(self._activate(staging), name="activate")

    async def _watch(self) -> None:
        request = pb.WatchRouteRequest(job_id=self._job_id, worker_id=self._worker_id)
        attempt = 0
        while True:
            try:
                async for route in stream(self._roster.WatchRoute, request, timeout_s=WATCH_S):
                    attempt = 0
                    await self._set_route(route)
            except DeadlineError:
                continue
            except PacelineError as error:
                log.warning("no route", job=self._job_id, error=error)
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    async def _set_route(self, route: pb.Route) -> None:
        async with self._news:
            self._route = route
            self._news.notify_all()

    async def _newer_than(self, version: Callable[[], int]) -> pb.Route:
        """The newest route, once it leads to a version after the one given."""
        async with self._news:
            while self._route is None or self._route.version.version <= version():
                await self._news.wait()
            return self._route

    async def _pull(self, route: pb.Route) -> Staging | None:
        """The snapshot; None if a newer one is there by now, or if nobody had it."""
        version = route.version.version
        endpoints = [e for e in (route.parent_endpoint, *route.fallback_endpoints) if e]
        started = asyncio.get_running_loop().time()
        pulling = asyncio.create_task(
            pull(
                endpoints,
                job_id=self._job_id,
                version=version,
                into=self._stage,
                timeout_s=PULL_S,
            )
        )
        newer = asyncio.create_task(self._newer_than(lambda: version))
        try:
            await asyncio.wait({pulling, newer}, return_when=asyncio.FIRST_COMPLETED)
            staging = pulling.result() if pulling.done() else None
        except PacelineError as error:
            log.warning("cannot pull", job=self._job_id, version=version, error=error)
            await asyncio.sleep(self._next_pause_s())
            return None
        finally:
            pulling.cancel()
            newer.cancel()
            await asyncio.wait({pulling, newer})
        took = asyncio.get_running_loop().time() - started
        self._metrics.observe("weight_seconds", took, job=self._job_id, stage="pull")
        return staging

    def _stage(self, header: Header) -> Staging:
        """Room for a snapshot, offered to peers before its first chunk is here."""
        staging = Staging(header)
        self._server.offer(staging)
        return staging

    async def _activate(self, staging: Staging) -> None:
        header = staging.header
        started = asyncio.get_running_loop().time()
        try:
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
        self._metrics.observe("weight_seconds", took, job=self._job_id, stage="swap")
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

    async def _accept(self, staging: Staging) -> None:
        header = staging.header
        if header.version < self.active.version:
            return
        self._failures = 0
        self.active = PolicyVersion(
            version=header.version,
            step=header.step,
            parent=header.parent_version,
            incarnation=header.incarnation,
            digest=staging.root,
            num_bytes=header.num_bytes,
        )
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
        await asyncio.sleep(self._next_pause_s())
        async with self._news:
            if self._have == header.version:
                self._have = header.version - 1
                self._news.notify_all()

    def _next_pause_s(self) -> float:
        self._failures += 1
        return backoff_s(self._failures)
