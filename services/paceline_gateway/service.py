"""The gateway process: REST and gRPC on one event loop."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2_grpc

from paceline.chassis import Chassis, Service
from paceline.config.load import validate
from paceline.config.service import GatewayOptions, TlsSettings
from paceline.errors import ConfigError, UnavailableError
from paceline.logs import Log
from paceline.membership import Membership
from paceline.rpc import connect_as
from paceline.types import Worker, WorkerKind
from paceline.v1 import (
    access_pb2,
    access_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
)
from paceline.v1.access_pb2_grpc import AccessStub, GatekeeperStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.v1.tenants_pb2_grpc import TenantsStub
from paceline_gateway.administration import Administration
from paceline_gateway.app import create_app
from paceline_gateway.auth import Door
from paceline_gateway.bootstrap import bootstrap_token, own_tokens
from paceline_gateway.guard import GrpcGuard, before_reading
from paceline_gateway.handling import Handling
from paceline_gateway.jobs import Desk
from paceline_gateway.messages import check_size
from paceline_gateway.readiness import Readiness
from paceline_gateway.refusals import Refusals
from paceline_gateway.rules import check_grpc
from paceline_gateway.servicer import AccessServicer, JobsServicer, TenantsServicer
from paceline_gateway.web import Web

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import AccessAsyncStub, GatekeeperAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub
    from paceline.v1.tenants_pb2_grpc import TenantsAsyncStub

log = Log("gateway")


async def build(chassis: Chassis) -> GatewayService:
    """Make the service from the settings of this process; takes the REST port at once."""
    settings = chassis.settings
    if not settings.experience:
        raise ConfigError("experience: host:port of the experience service is missing")
    options = validate(GatewayOptions, settings.options)
    if options.https and settings.tls is None:
        raise ConfigError("options.https: needs the certificate of tls")
    certificate = settings.tls if options.https else None
    listener = listen(settings.host, options.http_port)
    return GatewayService(chassis=chassis, listener=listener, certificate=certificate)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket.

    Raises:
        UnavailableError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise UnavailableError(
            f"http_port {port} on {host} cannot be bound ({error.strerror}); "
            "stop what holds it or choose another"
        ) from None
    return bound


class GatewayService(Service):
    """Serves users until it is told to stop."""

    def __init__(
        self, *, chassis: Chassis, listener: socket.socket, certificate: TlsSettings | None = None
    ) -> None:
        settings = chassis.settings
        self._chassis = chassis
        self._listener = listener
        self._channel = connect_as(settings, settings.experience)
        jobs: JobsAsyncStub = JobsStub(self._channel)
        roster: RosterAsyncStub = RosterStub(self._channel)
        access: AccessAsyncStub = AccessStub(self._channel)
        tenants: TenantsAsyncStub = TenantsStub(self._channel)
        gatekeeper: GatekeeperAsyncStub = GatekeeperStub(self._channel)
        self._refusals = Refusals(gatekeeper=gatekeeper, metrics=chassis.metrics)
        self._door = Door(
            gatekeeper=gatekeeper,
            refusals=self._refusals,
            own=own_tokens(bootstrap_token(settings)),
        )
        self._desk = Desk(jobs=jobs, refused=self._refusals.note, usage=chassis.usage)
        self._administration = Administration(access=access, tenants=tenants)
        self._membership = Membership(roster=roster, report=self.report)
        self._scheme = "http" if certificate is None else "https"
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        made = create_app(
            desk=self._desk,
            administration=self._administration,
            door=self._door,
            readiness=Readiness(check=health.Check),
        )
        self.app = made
        app = Handling(made, usage=chassis.usage)
        self._web = Web(app, certificate)
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where REST is served."""
        host = self._chassis.settings.host
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        return f"{self._scheme}://{host}:{self._listener.getsockname()[1]}"

    async def start(self) -> None:
        """Register the servicers and open REST."""
        server = self._chassis.server
        self._chassis.check_first(before_reading(self._door), check_size)
        jobs = self._guarded(JobsServicer(self._desk), "paceline.v1.Jobs")
        access = self._guarded(AccessServicer(self._administration), "paceline.v1.Access")
        jobs_pb2_grpc.add_JobsServicer_to_server(jobs, server)
        access_pb2_grpc.add_AccessServicer_to_server(access, server)
        tenants = self._guarded(TenantsServicer(self._administration), "paceline.v1.Tenants")
        tenants_pb2_grpc.add_TenantsServicer_to_server(tenants, server)
        check_grpc(
            file.services_by_name[name]
            for file, name in (
                (jobs_pb2.DESCRIPTOR, "Jobs"),
                (access_pb2.DESCRIPTOR, "Access"),
                (tenants_pb2.DESCRIPTOR, "Tenants"),
            )
        )
        self._serving = asyncio.create_task(self._web.serve([self._listener]), name="rest")

    def _guarded(self, servicer: object, service: str) -> Any:
        return GrpcGuard(servicer, service=service, door=self._door)

    async def run(self) -> None:
        """Say where we are, then stay in the roster while REST is served."""
        assert self._serving is not None
        self._tell()
        member = asyncio.create_task(self._membership.run(), name="membership")
        reports = asyncio.create_task(self._refusals.run(), name="refusals")
        try:
            done, _ = await asyncio.wait(
                {member, reports, self._serving}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            member.cancel()
            reports.cancel()

    def report(self) -> Worker:
        """This worker as the roster should know it."""
        settings = self._chassis.settings
        return Worker(
            worker_id=settings.worker_id,
            kind=WorkerKind.GATEWAY,
            endpoint=self._chassis.address,
            site=settings.site,
            load={"cpu_s": time.process_time()},
            pid=os.getpid(),
        )

    async def drain(self) -> None:
        """Leave the roster and finish open requests."""
        self._web.should_exit = True
        await self._refusals.flush()
        await self._membership.leave()
        if self._serving is not None:
            await self._serving

    async def close(self) -> None:
        """Let go of the port and the channel."""
        self._listener.close()
        await self._channel.close()

    def _tell(self) -> None:
        """Write our addresses to `<run_dir>/gateway.json`; what others wrote there stays."""
        path = self._chassis.settings.run_dir / "gateway.json"
        try:
            self._write(path)
        except OSError as error:  # where clients find us by a name, the folder may be read-only
            log.info("addresses are not written", path=path, error=error)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            known = {}
        where = {"http": self.url, "url": self.url, "grpc": self._chassis.address}
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(known | where))
        draft.replace(path)
