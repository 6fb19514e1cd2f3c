"""The controller on one machine: reconciles, keeps a heartbeat file, drains its children."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from paceline.config.load import validate
from paceline.config.service import ControllerOptions
from paceline.front.local.devices.discovery import devices_here
from paceline.front.local.fork_server import PRELOADED
from paceline.front.local.ports import PortSlots
from paceline.platform.files import lock_for_life
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.server.membership import Membership
from paceline.platform.transport.rpc import connect_as
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.v1.tenants_pb2_grpc import TenantsStub
from paceline_controller.demand_source import GrpcDemandSource
from paceline_controller.jobs.costs import Costs
from paceline_controller.jobs.placements import Placements
from paceline_controller.jobs.progress import ProgressWatch
from paceline_controller.member import worker_of
from paceline_controller.reconciler import Reconciler
from paceline_controller.registry import GrpcJobRegistry
from paceline_controller.runtimes.process import ProcessRuntime
from paceline_controller.scaling.scaler import Scaler

BEAT_S = 1.0
DEVICES_S = 30.0
"""Between two looks at the machine's GPUs."""


class ControllerService(Service):
    """One controller per run directory."""

    def __init__(self, chassis: Chassis) -> None:
        settings = chassis.settings
        run_dir = settings.run_dir.resolve()
        self._lock = lock_for_life(run_dir / "controller.lock", what="a controller")
        self._beat = run_dir / "controller.beat"
        # The rest of the grace period is for kills and for this process itself.
        child_grace_s = settings.grace_s / 2
        self._channel = connect_as(settings, settings.experience)
        options = validate(ControllerOptions, settings.options)
        experience, roster = ExperienceStub(self._channel), RosterStub(self._channel)
        ledger = GrpcJobRegistry(
            jobs=JobsStub(self._channel),
            experience=experience,
            tenants=TenantsStub(self._channel),
        )
        self._placements = Placements(devices_here())
        self._runtime = ProcessRuntime(
            settings,
            credentials=ledger,
            ports=PortSlots(run_dir / "ports.json"),
            beat=self._beat,
            child_grace_s=child_grace_s,
            load_timeout_s=options.load_timeout_s,
            weights_mbit_per_s=options.weights_mbit_per_s,
            weights_transport=options.weights_transport,
            pools=options.pools,
            worlds=options.worlds,
            endpoints=options.endpoints,
            placements=self._placements,
            preloaded=PRELOADED,
        )
        source = GrpcDemandSource(roster=roster, experience=experience)
        self._reconciler = Reconciler(
            ledger=ledger,
            untracked=ledger.untracked,
            runtime=self._runtime,
            costs=Costs(chassis.metrics, options),
            options=options,
            child_grace_s=child_grace_s,
            reason_bytes=settings.limits.reason_bytes,
            sizing=Scaler(source=source, options=options, metrics=chassis.metrics),
            progress=ProgressWatch(source=source, metrics=chassis.metrics),
            placements=self._placements,
        )
        self._membership = Membership(
            roster=roster, report=partial(worker_of, chassis), usage=chassis.usage.totals
        )
        self._beats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the heartbeat, which children check from their first second on."""
        self._beats = asyncio.create_task(_touch_forever(self._beat), name="beat")

    async def run(self) -> None:
        """Reconcile until told to stop."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run(), name="membership")
            tasks.create_task(self._reconciler.run(), name="reconciler")
            if self._placements.devices:
                tasks.create_task(self._watch_devices(), name="devices")

    async def _watch_devices(self) -> None:
        """Notice GPUs that fall off the bus."""
        while True:
            await asyncio.sleep(DEVICES_S)
            self._placements.see(await asyncio.to_thread(devices_here))

    async def drain(self) -> None:
        """Stop all children: local ones end with their controller."""
        await self._reconciler.stop_all()
        await self._membership.leave()

    async def close(self) -> None:
        """Release the run directory."""
        if self._beats is not None:
            self._beats.cancel()
        await self._runtime.close()
        await self._channel.close()
        self._lock.close()


async def build(chassis: Chassis) -> Service:
    """Build the controller for the configured runtime."""
    options = validate(ControllerOptions, chassis.settings.options)
    if options.runtime == "kubernetes":
        # Imported late: the Kubernetes client takes a second and 20 MB.
        from paceline_controller.cluster import cluster

        return await cluster.build(chassis, options)
    return ControllerService(chassis)


async def _touch_forever(path: Path) -> None:
    while True:
        path.touch()
        await asyncio.sleep(BEAT_S)
