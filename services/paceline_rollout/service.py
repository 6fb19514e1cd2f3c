"""One rollout worker: its engine, its weights, its place in the roster."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

from paceline import rpc
from paceline.chassis import Chassis, Service
from paceline.config.load import validate
from paceline.config.service import RolloutOptions
from paceline.errors import ConfigError, PacelineError
from paceline.interfaces import Engine, EngineStatus
from paceline.logs import Log
from paceline.membership import Membership
from paceline.types import PolicyVersion, Worker, WorkerKind
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.rollout_pb2_grpc import add_RolloutServicer_to_server
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights.server import WeightServer
from paceline_rollout.gauges import Gauges
from paceline_rollout.job import build_engine, fetch_files, read_job
from paceline_rollout.servicer import Servicer
from paceline_rollout.streams import Hub
from paceline_rollout.vitals import Vitals
from paceline_rollout.worker import Follower

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

# The engine's thread and the event loop share one interpreter lock; with the default interval
# either waits 5 ms for the other.
SWITCH_S = 0.0005
WATCH_S = 0.2
log = Log("rollout")


async def build(chassis: Chassis) -> Service:
    """The service of this process."""
    return RolloutService(chassis)


class RolloutService(Service):
    """Generates for one job."""

    def __init__(self, chassis: Chassis) -> None:
        settings = chassis.settings
        if not settings.job_id:
            raise ConfigError("job_id: is empty; a rollout worker belongs to one job")
        options = validate(RolloutOptions, settings.options)
        self._chassis = chassis
        self._settings = settings
        self._pool, self._engines = options.pool, options.engines
        self._channel = rpc.connect_as(settings, settings.experience)
        self._roster: RosterAsyncStub = RosterStub(self._channel)
        self._weights = WeightServer(
            host=settings.host,
            port=options.weights_port,
            advertise_host=chassis.address.rpartition(":")[0],
            metrics=chassis.metrics,
            tls=settings.tls,
            bytes_per_s=options.weights_bytes_per_s,
        )
        self._weights_bytes_per_s = options.weights_bytes_per_s
        self._weights_endpoint = ""
        self._gauges = Gauges(chassis.metrics, job_id=settings.job_id)
        self._healthy = True
        self._changing = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._passing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the job, build the engine, get ready to serve."""
        sys.setswitchinterval(SWITCH_S)
        settings = self._settings
        jobs: JobsAsyncStub = JobsStub(self._channel)
        experience: ExperienceAsyncStub = ExperienceStub(self._channel)
        spec, artefacts = await read_job(jobs, settings.job_id)
        folder = settings.run_dir / "workers" / settings.worker_id / settings.job_id
        await fetch_files(experience, artefacts, folder)
        self._max_running = spec.rollout.max_concurrent
        self._engine: Engine = build_engine(
            spec, folder=folder, job_id=settings.job_id, engines=self._engines
        )
        await self._engine.start()
        self._weights_endpoint = await self._weights.start()
        self._hub = Hub(engine=self._engine, tracer=self._chassis.tracer)
        self._passing = asyncio.create_task(self._hub.run(), name="hub")
        self._follower = Follower(
            roster=self._roster,
            engine=self._engine,
            server=self._weights,
            job_id=settings.job_id,
            worker_id=settings.worker_id,
            activation=spec.rollout.activation,
            canary_tolerance=spec.rollout.canary_tolerance,
            metrics=self._chassis.metrics,
            changed=self._on_change,
            tls=settings.tls,
            bytes_per_s=self._weights_bytes_per_s,
            tracer=self._chassis.tracer,
        )
        follower = self._follower
        self._gauges.follow(lag=lambda: follower.lag, age_s=lambda: follower.age_s)
        self._chassis.usage.measure_seconds(lambda: self._engine.status().busy_s)
        self._member = Membership(
            roster=self._roster, report=self.report, progress=self._follower.progress
        )
        Vitals(
            engine=self._engine,
            hub=self._hub,
            follower=self._follower,
            max_lag=spec.experience.max_staleness,
        ).register(self._chassis.health.progress)
        servicer = Servicer(hub=self._hub, worker_id=settings.worker_id, status=self._status)
        add_RolloutServicer_to_server(servicer, self._chassis.server)
        log.info("engine ready", job=settings.job_id, engine=spec.rollout.engine.kind)

    async def run(self) -> None:
        """Serve until told to stop; fails when the engine does."""
        assert self._passing is not None
        self._join()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follower.run(), name="follow")
            group.create_task(self._watch_engine(), name="engine")
            await asyncio.shield(self._passing)

    async def drain(self) -> None:
        """Leave the roster and hand open requests back; callers go on elsewhere."""
        await self._leave()
        await self._hub.hand_back("the worker is draining; go on elsewhere")

    async def close(self) -> None:
        """Stop everything."""
        if self._passing is not None:
            self._passing.cancel()
            await asyncio.wait({self._passing})
        await self._engine.close()
        await self._weights.close()
        await self._channel.close()

    def report(self) -> Worker:
        """This worker as the roster is to see it."""
        now = self._engine.status()
        self._gauges.show(now)
        return Worker(
            worker_id=self._settings.worker_id,
            kind=WorkerKind.ROLLOUT,
            endpoint=self._chassis.address,
            site=self._settings.site,
            job_id=self._settings.job_id,
            active_version=self._active(now),
            weights_endpoint=self._weights_endpoint,
            pid=os.getpid(),
            pool=self._pool,
            load={
                "running": float(now.running),
                "waiting": float(now.waiting),
                "max_running": float(self._max_running),
                **self._hub.load(),
                "tokens_generated": float(now.tokens_generated),
                "prompt_tokens": float(now.prompt_tokens),
                "busy_s": now.busy_s,
                "idle_s": now.idle_s,
                "swap_s": now.swap_s,
                "cpu_s": time.process_time(),
            },
        )

    def _active(self, now: EngineStatus) -> int:
        """None where they are wrong, or where the engine has lost what it was given."""
        return min(self._follower.active.version, now.version) if self._healthy else -1

    def _status(self) -> tuple[EngineStatus, PolicyVersion, float]:
        return self._engine.status(), self._follower.active, self._follower.canary_error

    async def _on_change(self, healthy: bool) -> None:
        """A version is active, or its canary disagreed: then nobody may use this worker.

        It stays in the roster, without a version, to hear of newer ones.
        """
        async with self._changing:
            self._healthy = healthy
            await self._beat()
            if not healthy:
                text = "the worker's weights are wrong; go on elsewhere"
                self._hub.abort_all("UNAVAILABLE", text)

    async def _watch_engine(self) -> None:
        """Tell the roster at once when the engine loses its weights or has them again."""
        served = False
        while True:
            await asyncio.sleep(WATCH_S)
            now = self._engine.status().version >= 0
            if now != served and self._beating is not None:
                served = now
                await self._beat()

    async def _beat(self) -> None:
        try:
            await self._member.beat()
        except PacelineError as error:
            log.warning("no beat", error=error)

    def _join(self) -> None:
        if self._beating is None:
            self._beating = asyncio.create_task(self._member.run(), name="beat")

    async def _leave(self) -> None:
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            await asyncio.wait({beating})
            await self._member.leave()
