"""Servers with every method of their kind, none implemented, and those who call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from paceline.config.service import ServiceSettings, TlsSettings
from paceline.enums import WorkerKind
from paceline.platform.server.chassis import Chassis, Service, serve
from paceline.platform.transport.metadata_channel import Metadata
from paceline.platform.transport.rpc_authorization import callers
from paceline.platform.transport.service_keys import issue
from paceline_harness.callers.service_keys import metadata_of
from paceline_harness.certificates import Authority
from paceline_harness.patience import PATIENCE_S

PROTOS = Path(__file__).resolve().parents[4] / "protos" / "paceline" / "v1"
TOKEN = "a token that is in no message"
HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]


def module_of(service: str) -> Any:
    """The generated module of a service."""
    for path in PROTOS.glob("*.proto"):
        module = import_module(f"paceline.v1.{path.stem}_pb2")
        if service in module.DESCRIPTOR.services_by_name:
            return import_module(f"paceline.v1.{path.stem}_pb2_grpc")
    raise AssertionError(f"{service}: in no file of {PROTOS}")


def services() -> dict[str, Any]:
    """Descriptors of all services."""
    files = [import_module(f"paceline.v1.{path.stem}_pb2") for path in PROTOS.glob("*.proto")]
    found = {name: s for f in files for name, s in f.DESCRIPTOR.services_by_name.items()}
    return {**found, "Health": HEALTH}


def methods(server: WorkerKind) -> Iterator[MethodDescriptor]:
    for service in callers()[server]:
        yield from services()[service].methods


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


class Unfinished(Service):
    """Serves all methods of the table without implementations."""

    def __init__(self, chassis: Chassis) -> None:
        for service in set(callers()[chassis.settings.kind]) - {"Health"}:
            module = module_of(service)
            add = getattr(module, f"add_{service}Servicer_to_server")
            add(getattr(module, f"{service}Servicer")(), chassis.server)


@asynccontextmanager
async def served(
    kind: WorkerKind,
    tls: TlsSettings | None,
    service: Callable[[Chassis], Service] = Unfinished,
    **more: Any,
) -> AsyncGenerator[Chassis]:
    made: asyncio.Future[Chassis] = asyncio.get_running_loop().create_future()

    async def build(chassis: Chassis) -> Service:
        made.set_result(chassis)
        return service(chassis)

    token = TOKEN if kind is WorkerKind.GATEWAY else ""
    settings = ServiceSettings(kind=kind, worker_id=f"{kind}-0", tls=tls, token=token, **more)
    running = asyncio.create_task(serve(settings, build))
    await asyncio.wait({made, running}, return_when=asyncio.FIRST_COMPLETED)
    chassis = made.result()
    while chassis.health.why_unready():
        assert not running.done(), running.exception()
        await asyncio.sleep(0.01)
    try:
        yield chassis
    finally:
        chassis.stop()
        await running


class Caller:
    """A caller with a certificate (or none) or metadata, connected to a service of this kind."""

    def __init__(
        self,
        chassis: Chassis,
        credentials: grpc.ChannelCredentials | None,
        metadata: Metadata = (),
    ) -> None:
        self._metadata = metadata
        name = f"{chassis.settings.kind}.paceline.internal"
        options = [("grpc.ssl_target_name_override", name)]
        self.channel = (
            grpc.insecure_channel(chassis.address)
            if credentials is None
            else grpc.secure_channel(chassis.address, credentials, options=options)
        )

    async def call(
        self, method: MethodDescriptor, message: Any = None
    ) -> tuple[StatusCode, str, dict[str, Any]]:
        """Status, text and trailing metadata of one call.

        Not by grpc.aio: it tells an "internal error from Core" of a stream that was refused before
        its first message was on its way.
        """
        return await asyncio.to_thread(self._call, method, message)

    def _call(
        self, method: MethodDescriptor, message: Any = None
    ) -> tuple[StatusCode, str, dict[str, Any]]:
        kind = f"{_shape(method.client_streaming)}_{_shape(method.server_streaming)}"
        made = getattr(self.channel, kind)(
            path_of(method),
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        request: Any = message or GetMessageClass(method.input_type)()
        given = iter([request]) if method.client_streaming else request
        try:
            answer: Any = made(given, timeout=PATIENCE_S, metadata=self._metadata)
            if method.server_streaming:
                for _ in answer:
                    answer.cancel()
                    break
        except grpc.RpcError as refused:
            error: Any = refused
            return error.code(), error.details() or "", dict(error.trailing_metadata() or ())
        return StatusCode.OK, "", {}


def _shape(streams: bool) -> str:
    return "stream" if streams else "unary"


def credentials_of(tls: TlsSettings, trust: TlsSettings) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        trust.authority.read_bytes(), tls.key.read_bytes(), tls.certificate.read_bytes()
    )


class Proofs(Protocol):
    """How the services of an installation prove their kinds."""

    def server(self, kind: WorkerKind) -> dict[str, Any]:
        """Settings of a server."""
        ...

    def caller(self, chassis: Chassis, kind: WorkerKind) -> Caller:
        """A caller of this kind."""
        ...

    def asks(self, server: WorkerKind) -> bool:
        """Whether a server looks at what callers show."""
        ...


class Certificates:
    """By certificates of an authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder, name="ours")

    def server(self, kind: WorkerKind) -> dict[str, Any]:
        return {
            "tls": self._authority.issue("server", kinds=[kind], require_client=self.asks(kind))
        }

    def caller(self, chassis: Chassis, kind: WorkerKind) -> Caller:
        tls = chassis.settings.tls
        assert tls is not None
        return Caller(chassis, credentials_of(self._authority.issue(kind, kinds=[kind]), tls))

    def asks(self, server: WorkerKind) -> bool:
        return server is not WorkerKind.GATEWAY


class Keys:
    """By credentials of an installation whose keys are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def server(self, kind: WorkerKind) -> dict[str, Any]:
        return {"tls": None, "service_keys": issue(self._folder, [kind])[kind]}

    def caller(self, chassis: Chassis, kind: WorkerKind) -> Caller:
        return Caller(chassis, None, metadata_of(self._folder, chassis.settings.kind, kind))

    def asks(self, server: WorkerKind) -> bool:
        return True


def refusals(chassis: Chassis) -> float:
    name = "paceline_refused_calls_total"
    registry = chassis.metrics.registry
    return sum(registry.get_sample_value(name, {"caller": kind}) or 0.0 for kind in WorkerKind)
