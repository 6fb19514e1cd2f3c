"""Common runtime of every service: health, metrics, signals, drain, logs, supervisor watchdog."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from paceline import __version__
from paceline.config import ServiceSettings, parse_arguments
from paceline.enums import WorkerKind
from paceline.errors import PacelineError, UnavailableError
from paceline.platform.beneath import mark_private
from paceline.platform.server.health import Health, Probes
from paceline.platform.server.orphans import Orphans
from paceline.platform.telemetry import logs
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF, Tracer
from paceline.platform.telemetry.tracing import start as start_tracing
from paceline.platform.telemetry.usage import Usage
from paceline.platform.transport.request_reader import CheckSize
from paceline.platform.transport.rpc import (
    PUBLIC_OPTIONS,
    SERVER_OPTIONS,
    Admit,
    Authorize,
    ErrorInterceptor,
)
from paceline.platform.transport.rpc_authorization import Guard, RefusedCallers
from paceline.platform.transport.service_keys import identification
from paceline.platform.transport.tls import server_credentials, wait_for_renewal

CANCEL_S = 5.0
LATE_S = 1.5
VERDICT_S = 1.0
LAST_SPANS_S = 1.0  # less than `LATE_S`, so that a forced exit does not lose the last spans
GC_OBJECTS = 20_000  # allocated and not freed since the last collection
End = Callable[[int], object]
log = Log("chassis")


@dataclass(slots=True)
class Chassis:
    """The runtime passed to a service: settings, metrics, and a gRPC server not yet started."""

    settings: ServiceSettings
    server: aio.Server
    metrics: Metrics
    address: str  # host:port at which other processes reach it
    health: Health = field(default_factory=Health)
    tracer: Tracer = OFF
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    limit: threading.Timer | None = None
    failed: bool = False
    usage: Usage = field(default=cast(Usage, None))  # derived from the other fields by default
    # Both of `ErrorInterceptor`.
    check_first: Callable[[Admit, CheckSize], None] = lambda admit, size: None
    authorize: Callable[[Authorize], None] = lambda check: None

    def __post_init__(self) -> None:
        if cast(Usage | None, self.usage) is None:
            self.usage = usage_of(self.settings, self.metrics)

    def stop(self) -> None:
        """Begin to drain: the process becomes unready and its grace period starts."""
        if self.stopping.is_set():
            return
        self.health.drain()
        self.stopping.set()
        if self.limit is not None:
            self.limit.start()


class Service:
    """Base class of what `serve` runs; all methods are optional."""

    async def start(self) -> None:
        """Called before the server accepts calls."""

    async def run(self) -> None:
        """The service's main loop; returning stops the process, raising fails it."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Finish or hand over work in flight; cancelled after `grace_s`."""

    async def close(self) -> None:
        """Release all resources."""


Build = Callable[[Chassis], Awaitable[Service]]


def main(build: Build, argv: list[str] | None = None) -> int:
    """Run `python -m paceline_<service> FILE... [--set FIELD=VALUE ...]`; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        settings = parse_arguments(arguments, program="python -m paceline_<service>")
        logs.setup(settings.logs)
        return run_process(settings, build)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        log.error("cannot start", error=error)
        return 3 if isinstance(error, UnavailableError) else 2


def run_process(settings: ServiceSettings, build: Build, *, end: End = os._exit) -> int:
    """Run `serve` in an event loop and return the exit code."""
    code = run_loop(serve(settings, build, end=end))
    # Otherwise the final garbage collection traverses all of torch's objects, which takes seconds.
    gc.freeze()
    return code


def run_loop(coroutine: Any) -> Any:
    """Run a coroutine in an event loop: uvloop's if it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


async def serve(settings: ServiceSettings, build: Build, *, end: End | None = None) -> int:
    """Run one service until it is asked to stop; returns 0 after a clean drain, 1 after a failure.

    `end` terminates the process immediately. It is called with the exit code if the process
    is still running `LATE_S` after its grace period, whether it is stuck in a start, a thread or a
    blocked event loop.
    """
    if settings.token and settings.kind not in (WorkerKind.GATEWAY, WorkerKind.CONTROLLER):
        log.warning("token is not used by this kind of service", kind=settings.kind)
    mark_private(settings.run_dir)
    metrics = Metrics()
    metrics.watch_process()
    metrics.set("build", 1, service=settings.kind, version=__version__)
    usage = usage_of(settings, metrics)
    errors = ErrorInterceptor(metrics=metrics, usage=usage, guard=_guard(settings, metrics))
    server = aio.server(interceptors=[errors], options=_options(settings))
    port = bind(server, settings)
    address = address_of(settings, port)
    about = {"kind": settings.kind, "worker_id": settings.worker_id, "job": settings.job_id}
    health = Health(settings=settings.probes, about=about)
    host, port = settings.metrics_host or settings.host, settings.metrics_port
    probes = Probes(host=host, port=port, health=health, metrics=metrics)
    try:
        chassis = Chassis(
            settings=settings,
            server=server,
            metrics=metrics,
            address=address,
            health=health,
            tracer=start_tracing(settings, metrics),
            usage=usage,
            check_first=errors.check_first,
            authorize=errors.authorize,
        )
        if end is not None:
            chassis.limit = _exit_timer(chassis, end)
        try:
            return await _live(chassis, build)
        finally:
            chassis.tracer.close(LAST_SPANS_S)
    finally:
        probes.close()


def _options(settings: ServiceSettings) -> list[tuple[str, Any]]:
    return PUBLIC_OPTIONS if settings.kind is WorkerKind.GATEWAY else SERVER_OPTIONS


def _guard(settings: ServiceSettings, metrics: Metrics) -> Guard | None:
    identify = identification(settings)
    if identify is None:
        log.warning("insecure: callers need to prove nothing", kind=settings.kind)
        return None
    return Guard(kind=settings.kind, identify=identify, refusals=RefusedCallers(metrics))


async def _live(chassis: Chassis, build: Build) -> int:
    settings = chassis.settings
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, chassis.server)
    _on_signals(chassis)
    async with _background(
        beat=chassis.health.beat,
        verdict=partial(_publish_health, chassis.health, health),
        usage=chassis.usage.watch,
        guard=partial(_orphan_guard, chassis),
        renewal=partial(_renew, chassis),
        orphans=Orphans().watch,
    ):
        service = await build(chassis)
        await service.start()
        await chassis.server.start()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        chassis.health.serve()
        # Imported modules stay, so no collection has to traverse them. Open requests are many small
        # objects without cycles, so collections are rare.
        gc.freeze()
        gc.set_threshold(GC_OBJECTS, 20, 20)
        log.info("serving", kind=settings.kind, worker=settings.worker_id, address=chassis.address)
        work = asyncio.create_task(service.run(), name="run")
        await _until_stopped(chassis, work)
        chassis.stop()
        await health.enter_graceful_shutdown()
        await _end(chassis, service, work)
    log.info("stopped", kind=settings.kind, worker=settings.worker_id, failed=chassis.failed)
    return 1 if chassis.failed else 0


async def _publish_health(health: Health, servicer: HealthServicer) -> None:
    """Publish liveness through gRPC health checks too, which a controller may use as its probe."""
    before = ""
    while True:
        await asyncio.sleep(VERDICT_S)
        why = health.why_dead()
        if bool(why) != bool(before):
            log.warning("not alive" if why else "alive again", why=why or before)
            reply = health_pb2.HealthCheckResponse
            await servicer.set("", reply.NOT_SERVING if why else reply.SERVING)
        before = why


def usage_of(settings: ServiceSettings, metrics: Metrics) -> Usage:
    """The usage meter for this kind of process; in environments, waits add up over episodes."""
    return Usage(metrics, service=settings.kind, each=settings.kind is WorkerKind.ENVIRONMENT)


def bind(server: aio.Server, settings: ServiceSettings) -> int:
    """Bind the gRPC port; raises `UnavailableError` if in use, `ConfigError` for bad `tls`."""
    wanted = _joined(settings.host, settings.port)
    credentials = None if settings.tls is None else server_credentials(settings.tls)
    try:
        if credentials is None:
            port = server.add_insecure_port(wanted)
        else:
            port = server.add_secure_port(wanted, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise UnavailableError(
            f"port {settings.port} on {settings.host} is in use; "
            "stop the process that holds it or choose another"
        )
    return port


def address_of(settings: ServiceSettings, port: int) -> str:
    """The host:port at which other processes reach this one; IPv6 hosts are bracketed."""
    if not settings.advertise:
        return _joined(settings.host, port)
    host, _, advertised_port = settings.advertise.rpartition(":")
    return _joined(host, advertised_port)


def _joined(host: str, port: int | str) -> str:
    bare = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if bare else f"{host}:{port}"


def _on_signals(chassis: Chassis) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, chassis.stop)


@asynccontextmanager
async def _background(**watches: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """Run these tasks until the block ends; a failure is logged and does not affect the others."""
    tasks = [
        asyncio.create_task(_logged(name, watch), name=name) for name, watch in watches.items()
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _logged(name: str, watch: Callable[[], Awaitable[None]]) -> None:
    try:
        await watch()
    except Exception:  # the supervisor boundary of this task
        log.exception("watch failed", watch=name)


async def _until_stopped(chassis: Chassis, work: asyncio.Task[None]) -> None:
    stop = asyncio.create_task(chassis.stopping.wait(), name="stop")
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()


async def _end(chassis: Chassis, service: Service, work: asyncio.Task[None]) -> None:
    """Cancel the work if it is still running, then drain and close."""
    grace_s = chassis.settings.grace_s
    try:
        async with asyncio.timeout(grace_s):
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=CANCEL_S)
            chassis.failed = _has_failed(work)
            await service.drain()
    except TimeoutError:
        log.warning("drain cut off", grace_s=grace_s)
    await chassis.server.stop(0.5)
    await service.close()


def _has_failed(work: asyncio.Task[None]) -> bool:
    if work.done() and not work.cancelled() and (error := work.exception()) is not None:
        cause = _cause(error)
        log.exception("service failed", of=error, error=cause, exc=type(cause).__name__)
        # The last words of the process, as if it had failed to start.
        print(f"{type(cause).__name__}: {cause}", file=sys.stderr)
        return True
    return False


def _cause(error: BaseException) -> BaseException:
    """The first error of groups, which themselves say nothing."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _exit_timer(chassis: Chassis, end: End) -> threading.Timer:
    grace_s = chassis.settings.grace_s

    def on_deadline() -> None:
        log.error("forced to exit", grace_s=grace_s, failed=chassis.failed)
        end(1 if chassis.failed else 0)

    timer = threading.Timer(grace_s + LATE_S, on_deadline)
    timer.daemon = True
    return timer


async def _renew(chassis: Chassis) -> None:
    """Stop this process once its certificates have changed; its supervisor restarts it."""
    if chassis.settings.tls is not None:
        await wait_for_renewal(chassis.settings.tls)
        chassis.stop()


async def _orphan_guard(chassis: Chassis) -> None:
    """Stop this process when the supervisor's heartbeat file is stale."""
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
