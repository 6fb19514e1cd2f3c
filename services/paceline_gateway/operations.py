"""The handler of every operation for users, shared by REST and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import grpc
from grpc import aio

from paceline.transport.operations import Operation, for_users
from paceline.transport.principal import Principal
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
    return {each: custom.get(each.name) or _forward(upstream, each) for each in for_users()}


def _forward(upstream: Upstream, each: Operation) -> Handler:
    return partial(upstream.stream if each.streams_replies else upstream.call, each)


def serve_grpc(server: aio.Server, table: Mapping[Operation, Handler], guard: GrpcGuard) -> None:
    """Register all operations, each behind the guard."""
    for service, found in groupby(sorted(table, key=_sort_key), key=lambda each: each.service):
        methods = {each.name: _method(each, guard.wrap(table[each], each)) for each in found}
        generic = grpc.method_handlers_generic_handler(f"paceline.v1.{service}", methods)
        server.add_generic_rpc_handlers((generic,))


def _sort_key(each: Operation) -> tuple[str, str]:
    return each.service, each.name


def _method(each: Operation, behaviour: Callable[..., Any]) -> Any:
    make = (
        grpc.unary_stream_rpc_method_handler
        if each.streams_replies
        else grpc.unary_unary_rpc_method_handler
    )
    if each.streams_requests:
        make = grpc.stream_unary_rpc_method_handler
    return make(
        behaviour,
        request_deserializer=each.request.FromString,
        response_serializer=each.reply.SerializeToString,
    )
