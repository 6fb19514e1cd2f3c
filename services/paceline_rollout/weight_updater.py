"""Keeps an engine on the newest policy version: follows routes, swaps, checks canaries."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.config import JobSpec
from paceline.enums import Phase
from paceline.errors import (
    DeadlineError,
    IntegrityError,
    MisfitError,
    PacelineError,
    StateError,
    UnavailableError,
)
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF, Span, Tracer, step_context
from paceline.platform.transport.rpc import backoff_s, stream
from paceline.plugins import Engine, ProvesWeights, RollsBack, WeightSnapshot
from paceline.types import PolicyVersion, WeightRefusal, WorkerPhase
from paceline.v1 import roster_pb2 as pb
from paceline.weights.canary import CanaryRule, CanaryVerdict
from paceline.weights.model_config import difference
from paceline.weights.route import Route, TransferProgress
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.staging import Staging
from paceline.weights.snapshot.threads import in_thread
from paceline.weights.transport import WeightTransport
from paceline_rollout.reports import Reports

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

WATCH_TIMEOUT_S = 3600.0
HIGH_RATIO = 1.5
"""Above it, an accepted engine is worth a warning: correct ones stay below 1.2."""
PROVE_EVERY = 16
"""Versions, of which the first is proved by its bytes, as log-probs do not show a stale tensor. So
is the second version of a process: some engines only show what has changed."""
NONE = PolicyVersion(version=-1, step=-1)
OnChange = Callable[[int, bool], Awaitable[None]]
log = Log("rollout")


class RefusedWeightsError(PacelineError):
    """The engine computes something else with weights that are right: it has to start again."""


class WeightUpdater:
    """Follows the routes of one worker; a receiver pulls while the engine keeps generating.

    `changed(version, True)` is awaited after a version is active and its canary agrees,
    `changed(version, False)` when its canary disagrees; the bytes of that version are then loaded
    again. After `max_refusals` of one version in a row it is refused for good, and until a newer
    one arrives the engine goes back to the version before, which is held that long. `run` raises
    RefusedWeightsError once `overrule` or `end` says that the engine is at fault, as only another
    one is left to try; so it does at once for weights of another model than the engine's, as by
    `config_json`, what `model_config.canonical` says of the engine's own.
    """

    def __init__(
        self,
        *,
        roster: RosterAsyncStub,
        engine: Engine,
        transport: WeightTransport,
        job_id: str,
        worker_id: str,
        activation: str,
        rule: CanaryRule,
        max_refusals: int,
        config_json: str = "",
        metrics: Metrics,
        changed: OnChange,
        tracer: Tracer = OFF,
    ) -> None:
        self.active = NONE
        self.newest = NONE  # of all routes received
        self.canary_error = 0.0
        self.refusal: WeightRefusal | None = None  # of the newest version that was received
        self._faults: asyncio.Queue[str] = asyncio.Queue()  # for which the engine has to end
        self._active_since: float | None = None
        self._roster = roster
        self._engine = engine
        self._transport = transport
        self._job_id = job_id
        self._worker_id = worker_id
        self._activation = activation
        self._rule = rule
        self._max_refusals = max_refusals
        self._config_json = config_json
        self._metrics = metrics
        self._changed = changed
        self._failures = 0
        self._refused: tuple[int, int] = (-1, 0)  # a version, and how often
        self._loading: WorkerPhase | None = None  # or checking
        self._num_proved = 0
        self._due = 0  # the version from which on the engine has to show its bytes again
        self._tracer = tracer
        self._routed_ns: dict[int, int] = {}  # version -> time of its first route
        self._reports = Reports(roster, job_id=job_id)
        self._received: asyncio.Queue[Staging] = asyncio.Queue()
        self._receiver = transport.receive(
            job_id=job_id,
            worker_id=worker_id,
            report=self._reports.add,
            complete=self._received.put_nowait,
            keep=self._kept,
        )

    @property
    def lag(self) -> int:
        """Versions between the active one and the newest one that was routed here."""
        return max(self._receiver.wanted - self.active.version, 0)

    @property
    def age_s(self) -> float:
        """Seconds since the active version was loaded; NaN before the first one."""
        return math.nan if self._active_since is None else time.monotonic() - self._active_since

    @property
    def phase(self) -> WorkerPhase:
        """The phase of the newest version, or the version that is served or refused."""
        if self._loading is not None:
            return self._loading
        if self._receiver.wanted > self._receiver.latest:
            return self._receiving()
        if self.refusal is not None:
            return WorkerPhase(Phase.REFUSING_WEIGHTS, self.refusal.version)
        if self.active.version < 0:
            return WorkerPhase(Phase.WAITING_FOR_WEIGHTS)
        return WorkerPhase(Phase.SERVING, self.active.version)

    def _receiving(self) -> WorkerPhase:
        wanted, total = self._receiver.wanted, float(self.newest.num_bytes)
        transfers = (
            transfer for transfer in self._receiver.progress() if transfer.version == wanted
        )
        parts = next(((e.num_ready / e.num_chunks) for e in transfers if e.num_chunks), 0.0)
        return WorkerPhase(Phase.RECEIVING_WEIGHTS, wanted, parts * total, total)

    def progress(self) -> list[TransferProgress]:
        """Chunks that this worker can serve to peers, by version."""
        return self._receiver.progress()

    async def run(self) -> None:
        """Follow routes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="route")
            group.create_task(self._receiver.run(), name="receive")
            group.create_task(self._reports.run(), name="report")
            group.create_task(self._end_at_fault(), name="fault")
            while True:
                # In the engine, a newer version displaces one that still waits to be swapped in.
                staging = await self._received.get()
                group.create_task(self._activate(staging), name="activate")
                del staging  # the memory of an unreferenced snapshot is reused for the next one

    def overrule(self, version: int) -> None:
        """Another worker serves this version: if it is refused here, the engine is at fault."""
        refusal = self.refusal
        if refusal is not None and refusal.version == version:
            self.end(
                f"version {refusal.version}, which another worker serves, was refused in "
                f"{self._max_refusals} loads of the same bytes: {refusal.reason}"
            )

    def end(self, fault: str) -> None:
        """The engine is wrong, as `fault` says: `run` ends."""
        self._faults.put_nowait(fault)

    async def _end_at_fault(self) -> None:
        raise RefusedWeightsError(await self._faults.get())

    async def _watch(self) -> None:
        request = pb.WatchRouteRequest(job_id=self._job_id, worker_id=self._worker_id)
        attempt = 0
        while True:
            try:
                async for route in stream(
                    self._roster.WatchRoute, request, timeout_s=WATCH_TIMEOUT_S
                ):
                    attempt = 0
                    parsed = wire.from_proto(route, Route)
                    self._routed_ns.setdefault(parsed.version.version, self._tracer.now())
                    self.newest = parsed.version
                    if not self._receiver.route(parsed) and self.active.version >= 0:
                        await self._changed(parsed.version.version, False)
            except DeadlineError:
                continue
            except PacelineError as error:
                log.warning("route stream lost", job=self._job_id, error=error)
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    async def _activate(self, staging: Staging) -> None:
        header = staging.header
        started = asyncio.get_running_loop().time()
        span = self._step_span(header)
        try:
            if problem := difference(self._config_json, header.config_json):
                raise MisfitError(problem)
            with span.child("weights.swap", worker=self._worker_id, version=header.version):
                with self._in_phase(Phase.LOADING_WEIGHTS, header):
                    await self._engine.load(_loadable(staging), self._activation)
                with self._in_phase(Phase.CHECKING_WEIGHTS, header):
                    verdict = await self._check(staging)
        except MisfitError as error:
            await self._changed(header.version, False)
            what = f"version {header.version} (step {header.step})"
            raise RefusedWeightsError(f"{what} cannot be loaded: {error}") from error
        except StateError as error:
            log.info("version not loaded", job=self._job_id, version=header.version, error=error)
            return
        except PacelineError as error:
            log.error(
                "version cannot be loaded", job=self._job_id, version=header.version, error=error
            )
            await self._retry(staging)
            return
        swap_s = asyncio.get_running_loop().time() - started
        self._metrics.add("weight_seconds", swap_s, job=self._job_id, stage="swap")
        self.canary_error = verdict.difference
        if not verdict.accepted:
            await self._refuse(staging, verdict)
            return
        await self._accept(staging)

    @contextmanager
    def _in_phase(self, phase: Phase, header: SnapshotHeader) -> Generator[None]:
        mine = self._loading = WorkerPhase(phase, header.version)
        try:
            yield
        finally:
            if self._loading is mine:  # else a newer version is being loaded meanwhile
                self._loading = None

    def _step_span(self, header: SnapshotHeader) -> Span:
        """The span of the step that made a version, with a child for receiving it."""
        context = step_context(self._job_id, header.incarnation, header.step)
        span = self._tracer.below(context)
        routed = self._routed_ns.get(header.version, self._tracer.now())
        span.past("weights.receive", routed, worker=self._worker_id, version=header.version)
        self._routed_ns = {v: ns for v, ns in self._routed_ns.items() if v > header.version}
        return span

    async def _accept(self, staging: Staging) -> None:
        header = staging.header
        if header.version < self.active.version:
            return
        self._failures = 0
        self.refusal = None
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
        log.info("version active", job=self._job_id, version=header.version, step=header.step)
        await self._changed(header.version, True)

    async def _check(self, staging: Staging) -> CanaryVerdict:
        """The verdict of the canary, and now and then of the bytes, on the loaded weights."""
        header = staging.header
        scored = [await self._engine.score(sequence.tokens) for sequence in header.canary.sequences]
        self._check_active(header.version)
        verdict = self._rule.verdict(header.canary, scored)
        self._metrics.set("weight_canary_ratio", verdict.ratio, job=self._job_id)
        if verdict.accepted and verdict.ratio > HIGH_RATIO:
            log.warning("canary is close to refusal", version=header.version, verdict=verdict)
        if verdict.accepted and header.version < self._due:
            return verdict
        return await self._prove(staging, verdict)

    def _check_active(self, version: int) -> None:
        """Raises if what the engine said is not of this version."""
        active = self._engine.status().version
        if active > version:
            raise StateError(f"version {version} was replaced before it was checked")
        if active < version:
            raise UnavailableError(f"the engine lost version {version} before it was checked")

    async def _prove(self, staging: Staging, verdict: CanaryVerdict) -> CanaryVerdict:
        """The verdict with the tensors that the engine has otherwise, if it can tell."""
        if not isinstance(self._engine, ProvesWeights):
            return verdict
        unequal = await self._engine.unequal(_loadable(staging))
        self._check_active(staging.header.version)
        if not unequal:
            self._due = staging.header.version + (PROVE_EVERY if self._num_proved else 1)
            self._num_proved += 1
        return replace(verdict, unequal=tuple(unequal))

    async def _refuse(self, staging: Staging, verdict: CanaryVerdict) -> None:
        header = staging.header
        log.error(
            "canary disagrees", job=self._job_id, version=header.version, verdict=str(verdict)
        )
        version, times = self._refused
        self._refused = header.version, (times if version == header.version else 0) + 1
        if self._refused[1] < self._max_refusals:
            await self._retry(staging)
            return
        if not await self._is_intact(staging):
            return
        self.refusal = WeightRefusal(header.version, str(verdict))
        await self._changed(header.version, False)
        await self._roll_back()

    async def _is_intact(self, staging: Staging) -> bool:
        """Whether a version is still held as it arrived; if not, it is fetched again."""
        version = staging.header.version
        try:
            await in_thread(self._transport.verify, staging)
        except IntegrityError as error:
            log.error("weights damaged in memory", job=self._job_id, version=version, error=error)
            self._refused = (-1, 0)
            await self._changed(version, False)
            self._receiver.refetch(version)
            return False
        return True

    def _kept(self) -> int:
        """The version before one that was refused; -1: the newest that was loaded is right."""
        return self.active.version if self._refused[0] > self.active.version else -1

    async def _roll_back(self) -> None:
        """Serve the version before again, as long as there is no newer one.

        It is no longer held if another one was received before the refused one was checked.
        """
        version = self.active.version
        staging = self._receiver.held(version)
        if staging is None or not isinstance(self._engine, RollsBack):
            log.warning("no version to go back to", job=self._job_id, version=version)
            return
        try:
            with self._in_phase(Phase.LOADING_WEIGHTS, staging.header):
                await self._engine.roll_back(_loadable(staging))
                verdict = await self._prove(staging, await self._check(staging))
        except PacelineError as error:
            log.warning("cannot go back", job=self._job_id, version=version, error=error)
            return
        if verdict.accepted:
            log.info("gone back", job=self._job_id, version=version)
            await self._changed(version, True)

    async def _retry(self, staging: Staging) -> None:
        """Stop serving and load this version again, unless another one has replaced it.

        Its bytes are verified: to receive them again would change nothing.
        """
        await self._changed(staging.header.version, False)
        self._failures += 1
        await asyncio.sleep(backoff_s(self._failures))
        if self._receiver.held(staging.header.version) is staging:
            self._received.put_nowait(staging)


def canary_rule(spec: JobSpec) -> CanaryRule:
    """The job's rule; `rollout.canary_tolerance` has no effect, and is warned of."""
    if spec.rollout.canary_tolerance is not None:
        log.warning(
            "rollout.canary_tolerance has no effect; the noise that the trainer measures decides, "
            "see rollout.canary",
            given=spec.rollout.canary_tolerance,
        )
    return CanaryRule(ratio=spec.rollout.canary.ratio, floor=spec.rollout.canary.floor)


def _loadable(staging: Staging) -> WeightSnapshot:
    """The snapshot as engines take it: with adapters merged into their weights."""
    if not staging.header.has_adapters:
        return staging
    # Only engines that have torch get snapshots with adapters.
    from paceline.weights.adapters import MergedSnapshot

    return MergedSnapshot(staging)
