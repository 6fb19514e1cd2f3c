"""The handler of every operation for users, shared by REST and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import grpc
from grpc import aio

from paceline.platform.transport.operations import Operation, for_users
from paceline.platform.transport.principal import Principal
from paceline_gateway.access.guard import GrpcGuard
from paceline_gateway.job_api import JobApi
from paceline_gateway.upstream import Upstream

Handler = Callable[[Any, Principal], Any]
"""Takes a request, or an async iterator of them, and its caller; returns an awaitable reply or an
async iterator of replies."""


def handlers(upstream: Upstream, jobs: JobApi) -> Mapping[Operation, Handler]:
    """Handlers by operation; most are forwarded unchanged."""
    custom: Mapping[str, Handler] = {
        "SubmitJob": jobs.submit,
        "UploadCode": jobs.upload,
        "WatchJob": jobs.watch,
    }
    return {
        operation: custom.get(operation.name) or _forward(upstream, operation)
        for operation in for_users()
    }


def _forward(upstream: Upstream, operation: Operation) -> Handler:
    return partial(upstream.stream if operation.streams_replies else upstream.call, operation)


def serve_grpc(server: aio.Server, table: Mapping[Operation, Handler], guard: GrpcGuard) -> None:
    """Register all operations, each behind the guard."""
    for service, members in groupby(
        sorted(table, key=_sort_key), key=lambda operation: operation.service
    ):
        methods = {
            operation.name: _method(operation, guard.wrap(table[operation], operation))
            for operation in members
        }
        generic = grpc.method_handlers_generic_handler(f"paceline.v1.{service}", methods)
        server.add_generic_rpc_handlers((generic,))


def _sort_key(operation: Operation) -> tuple[str, str]:
    return operation.service, operation.name


def _method(operation: Operation, behaviour: Callable[..., Any]) -> Any:
    make = (
        grpc.unary_stream_rpc_method_handler
        if operation.streams_replies
        else grpc.unary_unary_rpc_method_handler
    )
    if operation.streams_requests:
        make = grpc.stream_unary_rpc_method_handler
    return make(
        behaviour,
        request_deserializer=operation.request.FromString,
        response_serializer=operation.reply.SerializeToString,
    )
