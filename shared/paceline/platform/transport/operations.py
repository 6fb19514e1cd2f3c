"""Every RPC of `paceline.v1` with the options of its proto: callers, role, HTTP routes.

The options (`protos/paceline/v1/options.proto`) are the single source: caller checks, the
gateway's access rules and routes, and the SDK are derived from them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from google.api import annotations_pb2
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paceline import v1
from paceline.enums import WorkerKind
from paceline.platform import wire
from paceline.platform.transport.principal import Role
from paceline.v1 import options_pb2

# Metadata of UploadCode between services: the size of the archive, so that one that is too large is
# refused before any of it is sent.
CODE_BYTES_KEY = "paceline-code-bytes"
_VERBS = ("get", "put", "post", "delete", "patch")


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One HTTP binding (`google.api.http`)."""

    method: str  # GET, POST, ...
    path: str  # with `{field}` for fields of the request
    body: str  # the field that is the body; `*`: all fields that are not in the path; empty: none

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One RPC."""

    service: str  # Jobs
    name: str  # SubmitJob
    served_by: WorkerKind
    callers: frozenset[WorkerKind]
    summary: str
    role: Role | None  # required of a user; None: not for users
    routes: tuple[HttpRoute, ...]
    request: type[Message]
    reply: type[Message]
    streams_requests: bool
    streams_replies: bool
    idempotent: bool
    large: bool

    @property
    def action(self) -> str:
        """`paceline.v1.Jobs/SubmitJob`."""
        return f"{v1.__name__}.{self.service}/{self.name}"

    @property
    def path(self) -> str:
        """`/paceline.v1.Jobs/SubmitJob`."""
        return f"/{self.action}"


@cache
def operations() -> Mapping[str, Operation]:
    """All RPCs, by path."""
    every = (_operation(method) for file in _files() for method in _methods(file))
    return {each.path: each for each in every}


@cache
def for_users() -> tuple[Operation, ...]:
    """The RPCs that the gateway serves to users."""
    return tuple(each for each in operations().values() if each.role is not None)


def operation(service: str, name: str) -> Operation:
    """One RPC.

    Raises:
        KeyError: no RPC has this name.
    """
    return operations()[f"/{v1.__name__}.{service}/{name}"]


def input_of(field: Any) -> options_pb2.Input:
    """The declared default, bound and values of a request field."""
    return field.GetOptions().Extensions[options_pb2.input]


def bounded(request: Message, name: str) -> int:
    """A numeric request field, its default if unset, clamped to between 1 and its bound."""
    declared = input_of(request.DESCRIPTOR.fields_by_name[name])
    return max(1, min(getattr(request, name) or declared.default, declared.max))


def _files() -> Iterator[FileDescriptor]:
    for module in pkgutil.iter_modules(v1.__path__):
        if module.name.endswith("_pb2"):
            yield import_module(f"{v1.__name__}.{module.name}").DESCRIPTOR


def _methods(file: FileDescriptor) -> Iterator[MethodDescriptor]:
    for service in file.services_by_name.values():
        yield from service.methods


def _operation(method: MethodDescriptor) -> Operation:
    options = method.GetOptions()
    declared = options.Extensions[options_pb2.operation]
    service = method.containing_service
    return Operation(
        service=service.name,
        name=method.name,
        served_by=wire.member_of(
            WorkerKind, service.GetOptions().Extensions[options_pb2.served_by], "served_by"
        ),
        callers=frozenset(wire.member_of(WorkerKind, each, "callers") for each in declared.callers),
        summary=declared.summary,
        role=wire.member_of(Role, declared.role, "role") if declared.role else None,
        routes=tuple(_routes(_extension(options, annotations_pb2.http))),
        request=GetMessageClass(method.input_type),
        reply=GetMessageClass(method.output_type),
        streams_requests=method.client_streaming,
        streams_replies=method.server_streaming,
        idempotent=options.idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN,
        large=declared.large,
    )


def _routes(rule: Any) -> Iterator[HttpRoute]:
    verb = rule.WhichOneof("pattern")
    if verb in _VERBS:
        yield HttpRoute(verb.upper(), getattr(rule, verb), rule.body)
    for each in rule.additional_bindings:
        yield from _routes(each)


def _extension(options: Any, handle: Any) -> Any:
    """An extension whose type Google's stubs do not declare."""
    return options.Extensions[handle]
