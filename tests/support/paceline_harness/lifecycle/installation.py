"""Experience, gateway and controller in this process, killed and started again on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpc import aio

from paceline.config import ServiceSettings
from paceline.config.service import ControllerOptions, ExperienceOptions
from paceline.config.tokenizers import TokenizerSettings
from paceline.enums import WorkerKind
from paceline.errors import DeadlineError, StoreError, UnavailableError
from paceline.platform.server.chassis import Chassis, Service, bind
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.principal import derived_token
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor, connect
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.tenants_pb2_grpc import TenantsStub
from paceline_controller.cluster.training_jobs import TrainingJobs
from paceline_controller.reconciler import Reconciler
from paceline_controller.runtimes.kubernetes.connection import KubernetesClient
from paceline_controller.runtimes.kubernetes.events import Events
from paceline_controller.runtimes.kubernetes.resources import TRAINING_JOBS
from paceline_controller.runtimes.kubernetes.watches import Cache
from paceline_experience.jobs.dry_run import DryRun
from paceline_experience.service import ExperienceService
from paceline_experience.store.store import Store
from paceline_gateway.service import GatewayService, listen
from paceline_harness.lifecycle.late import HoldingRegistry, LateRequest
from paceline_harness.lifecycle.machine import Machine
from paceline_harness.lifecycle.processes import SimulatedProcess
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port
from paceline_harness.wires import Wire

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

TOKEN = "pl_bootstrap_of_these_tests"
MEMBER_LEASE_S = 1.5
SETTLE_S = 0.15
GRACE_S = 0.5
HOLD_S = 0.5
_SPEED = 20  # of the clock of objects
Answer = TypeVar("Answer")
SERVICES = (WorkerKind.EXPERIENCE, WorkerKind.GATEWAY, WorkerKind.CONTROLLER)


@dataclass(slots=True)
class _Running:
    process: SimulatedProcess
    close: Callable[[], Coroutine[Any, Any, None]]


class Installation:
    """One installation, alone in its store; `cluster` has the objects of jobs.

    `dry_run` belongs to the caller: its processes take seconds to start.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        store: Path,
        cluster: KubernetesClient,
        dry_run: DryRun,
    ) -> None:
        self.run_dir = run_dir
        self.cluster = cluster
        self._upstream = store
        self._ports = {kind: free_port() for kind in SERVICES}
        self.machine = Machine(run_dir, self._address(WorkerKind.EXPERIENCE))
        self._dry_run = dry_run
        self._running: dict[WorkerKind, _Running] = {}
        self._wires = 0
        self._registry: HoldingRegistry | None = None  # of the controller
        self._users = connect(self._address(WorkerKind.GATEWAY), token=TOKEN)
        self.jobs: JobsAsyncStub = JobsStub(self._users)

    async def start(self, *kinds: WorkerKind) -> None:
        """Start services, all of them if none is named."""
        starts = {
            WorkerKind.EXPERIENCE: self._start_experience,
            WorkerKind.GATEWAY: self._start_gateway,
            WorkerKind.CONTROLLER: self._start_controller,
        }
        for kind in kinds or SERVICES:
            self._running[kind] = await starts[kind](SimulatedProcess(kind))

    async def kill(self, kind: WorkerKind, job_id: str = "") -> None:
        """SIGKILL to a service that has started, which starts again, or to workers."""
        if kind not in SERVICES:
            await self.machine.kill(kind, job_id)
            return
        running = self._running.pop(kind, None)
        if running is not None:  # else it is down already
            await _end(running)
            await self.start(kind)

    async def replace_controller(self) -> LateRequest | None:
        """Kill the controller while it asks to move a job on; that request is returned.

        None: it has not asked within `HOLD_S`.
        """
        if self._registry is None or WorkerKind.CONTROLLER not in self._running:
            return None
        late = await self._registry.hold(within_s=HOLD_S)
        await self.kill(WorkerKind.CONTROLLER)
        return late

    async def deliver(self, late: LateRequest) -> None:
        """Let a request arrive that was held.

        Raises:
            PacelineError: it is refused.
        """
        assert self._registry is not None
        await self._registry.set_state(late.job_id, late.state, reason=late.reason)

    def ends(self) -> dict[str, str]:
        """The errors that have ended services and workers; empty: they are alive."""
        services = {str(kind): each.process.last_words for kind, each in self._running.items()}
        return services | self.machine.ends()

    async def close(self) -> None:
        """End everything."""
        await self._users.close()
        for kind in reversed(SERVICES):
            running = self._running.pop(kind, None)
            if running is not None:
                await _end(running)
        await self.machine.close()

    def _address(self, kind: WorkerKind) -> str:
        return f"127.0.0.1:{self._ports[kind]}"

    def _settings(self, kind: WorkerKind, store: str = "", **options: object) -> ServiceSettings:
        is_experience = kind is WorkerKind.EXPERIENCE
        return ServiceSettings(
            kind=kind,
            worker_id=f"{kind}-0",
            port=self._ports[kind],
            run_dir=self.run_dir,
            experience="" if is_experience else self._address(WorkerKind.EXPERIENCE),
            store_url=store,
            token=TOKEN if kind is WorkerKind.GATEWAY else "",
            tokenizers=TokenizerSettings(run_in="in_process"),
            options=options,
        )

    async def _start_experience(self, process: SimulatedProcess) -> _Running:
        self._wires += 1
        path = self.run_dir.with_name(f"{self.run_dir.name}.w{self._wires}")
        url = f"unix://{path}"
        wire = Wire(upstream=self._upstream, path=path)
        await wire.__aenter__()
        chassis = await _chassis(self._settings(WorkerKind.EXPERIENCE, store=url))
        store = await Store.connect(url, wait_s=60)
        options = ExperienceOptions(
            sweep_s=0.05,
            member_lease_s=MEMBER_LEASE_S,
            lease_return_s=0.2,
            verify_interval_s=3600,
        )

        async def close() -> None:
            await wire.__aexit__(None, None, None)  # nothing more reaches the store
            await chassis.server.stop(None)
            with suppress(StoreError):
                await store.close()
            path.unlink(missing_ok=True)
            await service.release()

        service = ExperienceService(
            chassis, store=store, options=options, dry_run=self._dry_run, settle_s=SETTLE_S
        )
        await _serve(process, service, chassis)
        return _Running(process, close)

    async def _start_gateway(self, process: SimulatedProcess) -> _Running:
        chassis = await _chassis(self._settings(WorkerKind.GATEWAY))
        listener = listen("127.0.0.1", 0)
        service = GatewayService(chassis=chassis, listener=listener)

        async def close() -> None:
            # Closed while the loop still watches it, its number would pass to another socket,
            # which then would not be watched.
            asyncio.get_running_loop().remove_reader(listener)
            await chassis.server.stop(None)
            await service.close()

        await _serve(process, service, chassis)
        return _Running(process, close)

    async def _start_controller(self, process: SimulatedProcess) -> _Running:
        channel = connect(self._address(WorkerKind.EXPERIENCE))
        token = derived_token(TOKEN, "controller")
        gateway = connect(self._address(WorkerKind.GATEWAY), token=token)

        async def close() -> None:
            return

        registry = HoldingRegistry(
            jobs=JobsStub(channel),
            experience=ExperienceStub(channel),
            tenants=TenantsStub(channel),
        )
        self.machine.credentials = self._registry = registry
        reconciler = Reconciler(
            ledger=registry,
            runtime=self.machine,
            options=ControllerOptions(period_s=0.05, max_restart_backoff_s=0.1, give_up_after=1000),
            child_grace_s=GRACE_S,
        )
        cache = Cache(self.cluster, TRAINING_JOBS, on_change=lambda: None)
        objects = TrainingJobs(
            api=self.cluster,
            cache=cache,
            gateway=JobsStub(gateway),
            workers=self.machine,
            events=Events(self.cluster, identity="c", regarding=lambda _: None),
            clock=lambda: time.monotonic() * _SPEED,
        )

        async def main() -> None:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(reconciler.run())
                    tasks.create_task(cache.run())
                    tasks.create_task(_advance(objects))
            finally:
                await channel.close()
                await gateway.close()

        await process.start(main())
        return _Running(process, close)


async def _serve(process: SimulatedProcess, service: Service, chassis: Chassis) -> None:
    """The server's own tasks are not part of the process: gRPC does not survive their end."""
    ready = asyncio.Event()

    async def main() -> None:
        await service.start()
        ready.set()
        await service.run()

    await process.start(main())
    waiting = asyncio.create_task(ready.wait())
    assert process.main is not None
    await asyncio.wait({process.main, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if process.main.done():
        process.main.result()
    await chassis.server.start()


async def _end(running: _Running) -> None:
    closing = asyncio.create_task(running.close())
    await running.process.kill()
    await closing


async def _advance(objects: TrainingJobs) -> None:
    """As `run`, more often."""
    while True:
        with suppress(UnavailableError):
            await objects.once()
        await asyncio.sleep(0.05)


async def _chassis(settings: ServiceSettings) -> Chassis:
    metrics = Metrics()
    errors = ErrorInterceptor(metrics=metrics)
    server = aio.server(interceptors=[errors], options=SERVER_OPTIONS)
    for _ in range(100):  # until the port of the process that was killed is free
        try:
            port = bind(server, settings)
        except UnavailableError:
            await asyncio.sleep(0.02)
            continue
        return Chassis(
            settings=settings,
            server=server,
            metrics=metrics,
            address=f"127.0.0.1:{port}",
            check_first=errors.check_first,
            authorize=errors.authorize,
        )
    raise AssertionError(f"port {settings.port} stays taken")


async def retried(ask: Callable[[], Awaitable[Answer]], *, within_s: float = PATIENCE_S) -> Answer:
    """Ask again while services are away; returns the answer.

    Raises:
        PacelineError: it is refused, or nobody answers within `within_s`.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await ask()
        except (UnavailableError, DeadlineError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.03)
