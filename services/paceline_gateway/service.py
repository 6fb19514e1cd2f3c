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

from paceline.config.load import validate
from paceline.config.service import GatewayOptions, TlsSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError, UnavailableError
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.tokenizers.process import MODULE as TOKENIZER
from paceline.models.resolve import ModelResolver
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.server.membership import Membership
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import connect_as
from paceline.types import Worker
from paceline.v1.access_pb2_grpc import AuthenticationStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline_gateway.access.authentication import Authenticator
from paceline_gateway.access.bootstrap import bootstrap_token, own_tokens
from paceline_gateway.access.guard import GrpcGuard, before_reading
from paceline_gateway.access.refusals import Refusals
from paceline_gateway.http.app import create_app
from paceline_gateway.http.server import WebServer
from paceline_gateway.job_api import JobApi
from paceline_gateway.messages import check_size
from paceline_gateway.operations import handlers, serve_grpc
from paceline_gateway.readiness import Readiness
from paceline_gateway.request_usage import RequestUsage
from paceline_gateway.submit.trial import ModelTrial
from paceline_gateway.upstream import Upstream

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import AuthenticationAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub
    from paceline_gateway.submit.probe import ModelProbe

log = Log("gateway")


async def build(chassis: Chassis) -> GatewayService:
    """Build the service from its settings; binds the REST port at once."""
    settings = chassis.settings
    if not settings.experience:
        raise ConfigError("experience: host:port of the experience service is missing")
    options = validate(GatewayOptions, settings.options)
    if options.https and settings.tls is None:
        raise ConfigError("options.https: needs the certificate of tls")
    certificate = settings.tls if options.https else None
    listener = listen(settings.host, options.http_port)
    return GatewayService(
        chassis=chassis, listener=listener, certificate=certificate, options=options
    )


def _probe(run_dir: Path) -> ModelProbe:
    from paceline_gateway.submit.probe import ModelProbe  # only the extra `local` has all of it

    return ModelProbe(run_dir)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

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
    """Serves users over REST and gRPC."""

    def __init__(
        self,
        *,
        chassis: Chassis,
        listener: socket.socket,
        certificate: TlsSettings | None = None,
        options: GatewayOptions | None = None,
    ) -> None:
        settings = chassis.settings
        options = options or GatewayOptions()
        self._chassis = chassis
        self._listener = listener
        self._channel = connect_as(settings, settings.experience)
        roster: RosterAsyncStub = RosterStub(self._channel)
        authentication: AuthenticationAsyncStub = AuthenticationStub(self._channel)
        self._refusals = Refusals(authentication=authentication, metrics=chassis.metrics)
        self._authenticator = Authenticator(
            authentication=authentication,
            refusals=self._refusals,
            own=own_tokens(bootstrap_token(settings)),
            limits=settings.limits.access,
        )
        upstream = Upstream(self._channel, usage=chassis.usage)
        self._sandbox = sandbox_for(TOKENIZER)
        jobs = JobApi(
            upstream=upstream,
            on_refusal=self._refusals.note,
            models=ModelResolver(settings.models, run_dir=settings.run_dir),
            trial=ModelTrial(settings.tokenizers, self._sandbox),
            allowed=settings.plugins.targets,
            dtype=options.dtype,
            probe=_probe(settings.run_dir) if options.probe_models else None,
            endpoints=options.endpoints,
        )
        self._handlers = handlers(upstream, jobs)
        self._membership = Membership(roster=roster, report=self.report, usage=chassis.usage.totals)
        self._scheme = "http" if certificate is None else "https"
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        self.app = create_app(
            jobs=jobs,
            handlers=self._handlers,
            authenticator=self._authenticator,
            readiness=Readiness(check=health.Check),
        )
        app = RequestUsage(self.app, usage=chassis.usage)
        self._web = WebServer(app, certificate)
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The URL of the REST API."""
        host = self._chassis.settings.host
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        return f"{self._scheme}://{host}:{self._listener.getsockname()[1]}"

    async def start(self) -> None:
        """Register the servicers and open REST."""
        server = self._chassis.server
        self._chassis.check_first(before_reading(self._authenticator), check_size)
        serve_grpc(server, self._handlers, GrpcGuard(authenticator=self._authenticator))
        self._serving = asyncio.create_task(self._web.serve([self._listener]), name="rest")

    async def run(self) -> None:
        """Publish the addresses, then stay in the roster while REST is served."""
        assert self._serving is not None
        self._write_addresses()
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
        """This process, for the roster."""
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
        """Close the port and the channel, and end what is being tried."""
        self._listener.close()
        await self._sandbox.close()
        await self._channel.close()

    def _write_addresses(self) -> None:
        """Write the addresses to `<run_dir>/gateway.json`; keeps other fields of it."""
        path = self._chassis.settings.run_dir / "gateway.json"
        try:
            self._write(path)
        except OSError as error:  # may be read-only where clients use DNS
            log.info("addresses are not written", path=path, error=error)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            known = {}
        addresses = {"http": self.url, "url": self.url, "grpc": self._chassis.address}
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(known | addresses))
        draft.replace(path)
