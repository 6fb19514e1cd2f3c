"""One rollout worker: its engine, its weights, its membership in the roster."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.config.load import validate
from paceline.config.service import RolloutOptions
from paceline.enums import Phase, WorkerKind
from paceline.errors import ConfigError, PacelineError
from paceline.platform.free_memory import share_one_arena
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.server.membership import Membership
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport import rpc
from paceline.plugins import Engine, EngineStatus, registry
from paceline.types import PolicyVersion, Worker, WorkerPhase
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.rollout_pb2_grpc import add_RolloutServicer_to_server
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights.model_config import canonical
from paceline.weights.route import TransferProgress
from paceline.weights.transport import TransportSettings, make_transport
from paceline_rollout.gauges import RolloutGauges
from paceline_rollout.job import build_engine, fetch_files, read_job
from paceline_rollout.liveness import RolloutLiveness
from paceline_rollout.probation import Probation
from paceline_rollout.servicer import RolloutServicer
from paceline_rollout.streams import StreamMultiplexer
from paceline_rollout.weight_updater import WeightUpdater, canary_rule

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

# The engine's thread and the event loop share the GIL; with the default interval either one waits
# 5 ms for the other.
SWITCH_INTERVAL_S = 0.0005
ENGINE_POLL_S = 0.2
log = Log("rollout")


async def build(chassis: Chassis) -> Service:
    """A rollout worker from the settings of its process."""
    share_one_arena()
    return RolloutService(chassis)


class RolloutService(Service):
    """Generates tokens for one job."""

    def __init__(self, chassis: Chassis) -> None:
        settings = chassis.settings
        if not settings.job_id:
            raise ConfigError("job_id: is empty; a rollout worker belongs to one job")
        options = validate(RolloutOptions, settings.options)
        self._chassis = chassis
        self._settings = settings
        self._pool, self._engines = options.pool, options.engines
        self._memory_share = options.memory_share
        self._max_refusals = options.max_refusals
        self._channel = rpc.connect_as(settings, settings.experience)
        self._roster: RosterAsyncStub = RosterStub(self._channel)
        self._weights = make_transport(
            options.weights_transport,
            TransportSettings(
                host=settings.host,
                port=options.weights_port,
                advertise_host=chassis.address.rpartition(":")[0],
                metrics=chassis.metrics,
                tls=settings.tls,
                bytes_per_s=options.weights_bytes_per_s,
            ),
        )
        self._weights_endpoint = ""
        self._ready = False
        self._gauges = RolloutGauges(chassis.metrics, job_id=settings.job_id)
        self._healthy = True
        self._change_lock = asyncio.Lock()
        self._member = Membership(
            roster=self._roster,
            report=self.report,
            progress=self._progress,
            usage=chassis.usage.totals,
            refusal=lambda: self._updater.refusal if self._ready else None,
            at_fault=lambda version: self._updater.overrule(version),
            fault=lambda words: self._updater.end(words),
        )
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._multiplexer_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the job, build the engine and register the servicer.

        The worker is in the roster meanwhile: without weights, but with what it is at.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._join()
        try:
            await self._start()
        finally:
            if not self._ready:
                await self._leave()
        await self._join_with_weights()

    async def _start(self) -> None:
        settings = self._settings
        jobs: JobsAsyncStub = JobsStub(self._channel)
        experience: ExperienceAsyncStub = ExperienceStub(self._channel)
        spec, artifacts = await read_job(jobs, settings.job_id)
        folder = settings.run_dir / "workers" / settings.worker_id / settings.job_id
        await fetch_files(experience, artifacts, folder)
        self._max_running = spec.rollout.max_concurrent
        # The imports of an engine take seconds, in which heartbeats have to go on.
        await asyncio.to_thread(registry.find, "engines", spec.rollout.engine.kind)
        self._engine: Engine = build_engine(
            spec,
            folder=folder,
            job_id=settings.job_id,
            engines=self._engines,
            memory_share=self._memory_share,
        )
        await self._engine.start()
        self._weights_endpoint = await self._weights.start()
        self._multiplexer = StreamMultiplexer(
            engine=self._engine, tracer=self._chassis.tracer, probation=Probation()
        )
        self._multiplexer_task = asyncio.create_task(self._multiplexer.run(), name="multiplexer")
        self._updater = WeightUpdater(
            roster=self._roster,
            engine=self._engine,
            transport=self._weights,
            job_id=settings.job_id,
            worker_id=settings.worker_id,
            activation=spec.rollout.activation,
            rule=canary_rule(spec),
            max_refusals=self._max_refusals,
            config_json=canonical(folder / "config.json"),
            metrics=self._chassis.metrics,
            changed=self._on_change,
            tracer=self._chassis.tracer,
        )
        updater = self._updater
        self._gauges.follow(lag=lambda: updater.lag, age_s=lambda: updater.age_s)
        self._chassis.usage.measure_seconds(lambda: self._engine.status().busy_s)
        RolloutLiveness(
            engine=self._engine,
            multiplexer=self._multiplexer,
            updater=self._updater,
            max_lag=spec.experience.max_staleness,
        ).register(self._chassis.health.progress)
        servicer = RolloutServicer(
            multiplexer=self._multiplexer, worker_id=settings.worker_id, status=self._status
        )
        add_RolloutServicer_to_server(servicer, self._chassis.server)
        self._ready = True
        log.info("engine ready", job=settings.job_id, engine=spec.rollout.engine.kind)

    async def run(self) -> None:
        """Serve until cancelled; raises if the engine stops."""
        assert self._multiplexer_task is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._updater.run(), name="updater")
            group.create_task(self._watch_engine(), name="engine")
            await asyncio.shield(self._multiplexer_task)

    async def drain(self) -> None:
        """Leave the roster and end open requests; callers resume them on other workers."""
        await self._leave()
        await self._multiplexer.drain("the worker is draining; resume on another worker")

    async def close(self) -> None:
        """Stop the engine, the transport of weights and all tasks."""
        if self._multiplexer_task is not None:
            self._multiplexer_task.cancel()
            await asyncio.wait({self._multiplexer_task})
        await self._engine.close()
        await self._weights.close()
        await self._channel.close()

    def report(self) -> Worker:
        """The worker, its version and its load for the roster."""
        worker = Worker(
            worker_id=self._settings.worker_id,
            kind=WorkerKind.ROLLOUT,
            endpoint=self._chassis.address,
            site=self._settings.site,
            job_id=self._settings.job_id,
            pid=os.getpid(),
            pool=self._pool,
            phases=(WorkerPhase(Phase.STARTING_ENGINE),),
        )
        if not self._ready:
            return worker
        now = self._engine.status()
        self._gauges.show(now)
        return replace(
            worker,
            active_version=self._active(now),
            weights_endpoint=self._weights_endpoint,
            load=self._load(now),
            phases=(self._updater.phase,),
        )

    def _load(self, now: EngineStatus) -> dict[str, float]:
        return {
            "running": float(now.running),
            "waiting": float(now.waiting),
            "max_running": float(self._max_running),
            **self._multiplexer.load(),
            "tokens_generated": float(now.tokens_generated),
            "prompt_tokens": float(now.prompt_tokens),
            "busy_s": now.busy_s,
            "idle_s": now.idle_s,
            "swap_s": now.swap_s,
            "cpu_s": time.process_time(),
        }

    def _progress(self) -> list[TransferProgress]:
        return self._updater.progress() if self._ready else []

    def _active(self, now: EngineStatus) -> int:
        """The version that callers may use; -1 if weights are wrong or the engine lost them."""
        return min(self._updater.active.version, now.version) if self._healthy else -1

    def _status(self) -> tuple[EngineStatus, PolicyVersion, float]:
        return self._engine.status(), self._updater.active, self._updater.canary_error

    async def _on_change(self, version: int, healthy: bool) -> None:
        """This version has become active, or its canary disagrees (`healthy` is False).

        A newer one may be active by the time that the heartbeats of earlier changes are sent. An
        unhealthy worker stays in the roster without a version: it gets routes, but no requests.
        """
        async with self._change_lock:
            self._healthy = healthy
            if healthy:
                self._multiplexer.accept(version)
            await self._send_heartbeat()
            if not healthy:
                self._multiplexer.refuse(version)

    async def _watch_engine(self) -> None:
        """Send a heartbeat at once when the engine loses its weights or has them again."""
        served = False
        while True:
            await asyncio.sleep(ENGINE_POLL_S)
            now = self._engine.status().version >= 0
            if now != served and self._heartbeat_task is not None:
                served = now
                await self._send_heartbeat()

    async def _join_with_weights(self) -> None:
        """Be told of routes at once; the next heartbeat tries again."""
        try:
            await self._member.join()
        except PacelineError as error:
            log.warning("cannot join", error=error)

    async def _send_heartbeat(self) -> None:
        try:
            await self._member.beat()
        except PacelineError as error:
            log.warning("heartbeat failed", error=error)

    def _join(self) -> None:
        if self._heartbeat_task is None:
            self._heartbeat_task = asyncio.create_task(self._member.run(), name="heartbeat")

    async def _leave(self) -> None:
        beating, self._heartbeat_task = self._heartbeat_task, None
        if beating is not None:
            beating.cancel()
            await asyncio.wait({beating})
            await self._member.leave()
