"""What every service process shares: health, metrics, signals, drain, event logs, orphan guard."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from prometheus_client import start_http_server

from paceline import logs
from paceline.config import ServiceSettings, load_settings
from paceline.errors import PacelineError, UnavailableError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.rpc import SERVER_OPTIONS, ErrorInterceptor

log = Log("chassis")


@dataclass(slots=True)
class Chassis:
    """What a service gets handed: its settings, its gRPC server (not yet started), its metrics."""

    settings: ServiceSettings
    server: aio.Server
    metrics: Metrics
    address: str  # host:port under which others reach it
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Begin to drain."""
        self.stopping.set()


class Service:
    """What `serve` runs. Subclass it; all methods are optional."""

    async def start(self) -> None:
        """Called before the server accepts calls."""

    async def run(self) -> None:
        """The service's own work; returning ends the process, raising fails it."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Finish or hand over what is open; cut off after `grace_s`."""

    async def close(self) -> None:
        """Let go of everything."""


Build = Callable[[Chassis], Awaitable[Service]]


def main(build: Build, argv: list[str] | None = None) -> int:
    """`python -m paceline_<service> SETTINGS.yaml`; the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0] in {"-h", "--help"}:
        print("usage: python -m paceline_<service> SETTINGS.yaml", file=sys.stderr)
        return 2
    try:
        settings = load_settings(Path(arguments[0]))
        logs.setup(settings.logs)
        return run_loop(serve(settings, build))
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        log.error("cannot start", error=error)
        return 3 if isinstance(error, UnavailableError) else 2


def run_loop(coroutine: Any) -> Any:
    """Asyncio on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


async def serve(settings: ServiceSettings, build: Build) -> int:
    """Run one service until it is told to stop; 0 after a clean drain, 1 after a failure."""
    metrics = Metrics()
    tokens = [settings.token] if settings.token else []
    server = aio.server(
        interceptors=[ErrorInterceptor(metrics=metrics, tokens=tokens)], options=SERVER_OPTIONS
    )
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = bind(server, settings)
    _serve_metrics(settings, metrics)
    metrics.set("up", 1, kind=settings.kind)
    address = settings.advertise or f"{settings.host}:{port}"
    chassis = Chassis(settings=settings, server=server, metrics=metrics, address=address)
    service = await build(chassis)
    _on_signals(chassis)
    await service.start()
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    log.info("serving", kind=settings.kind, worker=settings.worker_id, address=address)
    failed = await _until_stopped(chassis, service)
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await _drain(service, settings.grace_s)
    await server.stop(0.5)
    await service.close()
    log.info("stopped", kind=settings.kind, worker=settings.worker_id, failed=failed)
    return 1 if failed else 0


def bind(server: aio.Server, settings: ServiceSettings) -> int:
    """Bind the gRPC port; raises `UnavailableError` if it is taken."""
    wanted = f"{settings.host}:{settings.port}"
    try:
        if settings.tls is None:
            port = server.add_insecure_port(wanted)
        else:
            tls = settings.tls
            pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
            credentials = grpc.ssl_server_credentials(
                [pair], tls.authority.read_bytes(), require_client_auth=True
            )
            port = server.add_secure_port(wanted, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise UnavailableError(
            f"port {settings.port} on {settings.host} is in use; "
            "stop what holds it or choose another"
        )
    return port


def _serve_metrics(settings: ServiceSettings, metrics: Metrics) -> None:
    try:
        start_http_server(settings.metrics_port, addr=settings.host, registry=metrics.registry)
    except OSError:
        raise UnavailableError(
            f"metrics_port {settings.metrics_port} on {settings.host} is in use"
        ) from None


def _on_signals(chassis: Chassis) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, chassis.stop)


async def _until_stopped(chassis: Chassis, service: Service) -> bool:
    work = asyncio.create_task(service.run(), name="run")
    stop = asyncio.create_task(chassis.stopping.wait(), name="stop")
    guard = asyncio.create_task(_orphan_guard(chassis), name="guard")
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    guard.cancel()
    stop.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait({work}, timeout=5.0)
    if work.done() and not work.cancelled() and (error := work.exception()) is not None:
        log.exception("service failed", of=error, error=error, exc=type(error).__name__)
        return True
    return False


async def _drain(service: Service, grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s):
            await service.drain()
    except TimeoutError:
        log.warning("drain cut off", grace_s=grace_s)


async def _orphan_guard(chassis: Chassis) -> None:
    """End this process when its supervisor has been away for too long."""
    beat = chassis.settings.supervisor
    if beat is None:
        return
    started = time.time()
    while True:
        await asyncio.sleep(min(2.0, beat.stale_s / 4))
        try:
            seen = beat.path.stat().st_mtime
        except FileNotFoundError:
            seen = 0.0
        if time.time() - max(seen, started) > beat.stale_s:
            log.warning("supervisor is gone", stale_s=beat.stale_s)
            chassis.stop()
            return
