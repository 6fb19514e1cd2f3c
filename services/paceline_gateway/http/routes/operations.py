"""REST routes generated from the protos, with their parameters and bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, cast

from fastapi import APIRouter, Body, Path, Query, Response
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import BaseModel

from paceline import enums
from paceline.front.api.documents import document_of
from paceline.platform import wire
from paceline.platform.transport.operations import HttpRoute, Operation, input_of
from paceline_gateway.http.routes.common import ERRORS, Caller
from paceline_gateway.http.views import view
from paceline_gateway.messages import MAX_TEXT, max_of
from paceline_gateway.operations import Handler

_KINDS: Mapping[int, type] = {
    FieldDescriptor.CPPTYPE_STRING: str,
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
}


def router_of(table: Mapping[Operation, Handler]) -> APIRouter:
    """A router for these operations."""
    router = APIRouter(responses=ERRORS)
    for operation, handler in table.items():
        for route in operation.routes:
            router.add_api_route(
                route.path,
                endpoint(operation, route, handler),
                methods=[route.method],
                status_code=_status(operation),
                response_model=document_of(operation.reply.DESCRIPTOR.name),
                tags=[operation.service.lower()],
                summary=operation.name,
                description=operation.summary,
                operation_id=f"{operation.name}_{route.method.lower()}",
            )
    return router


def endpoint(operation: Operation, route: HttpRoute, handler: Handler) -> Callable[..., Any]:
    """An endpoint for FastAPI, with a signature made from the fields of the request."""

    async def run(who: Any, **values: Any) -> Response:
        reply: Message = await handler(_request(operation, route, values), who)
        body = view(reply).model_dump_json()
        return Response(body, status_code=_status(operation), media_type="application/json")

    fields = _parameters(operation, route)
    parameters = [_parameter(name, kind, default) for name, kind, default in fields]
    caller = inspect.Parameter("who", inspect.Parameter.KEYWORD_ONLY, annotation=Caller)
    run.__signature__ = inspect.Signature([*parameters, caller])  # pyright: ignore[reportFunctionMemberAccess]
    run.__name__ = operation.name
    return run


def _status(operation: Operation) -> int:
    """HTTP status of a successful call."""
    return 201 if operation.name.startswith("Create") else 200


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _parameters(operation: Operation, route: HttpRoute) -> Iterator[tuple[str, Any, Any]]:
    """Names, annotations and defaults."""
    needed = inspect.Parameter.empty
    if route.body == "*":
        yield "body", Annotated[document_of(operation.request.DESCRIPTOR.name), Body()], needed
    for field in operation.request.DESCRIPTOR.fields:
        if f"{{{field.name}}}" in route.path:
            yield field.name, Annotated[str, Path()], needed
        elif field.name == route.body:
            yield field.name, Annotated[document_of(_message_of(field)), Body()], needed
        elif route.body != "*" and field.message_type is None:
            yield field.name, *_query(field)


def _message_of(field: Any) -> str:
    return field.message_type.name


def _query(field: Any) -> tuple[Any, Any]:
    option = input_of(field)
    kind: Any = getattr(enums, field.enum_type.name) if field.enum_type else _KINDS[field.cpp_type]
    bounds: dict[str, Any] = {}
    if kind is str:
        bounds = {"max_length": MAX_TEXT}
    elif kind is int:
        bounds = {"ge": 1 if option.default else 0, "le": max_of(field)}
    query = Query(description=option.description or None, **bounds)
    if field.is_repeated:
        return Annotated[list[kind], query], []
    if issubclass(kind, StrEnum) or field.has_presence:
        return Annotated[kind | None, query], None
    return Annotated[kind, query], kind(option.default) if kind is int else kind()


def _request(operation: Operation, route: HttpRoute, parameters: Mapping[str, Any]) -> Message:
    """The message of a request; missing parameters stay unset."""
    values = {name: value for name, value in parameters.items() if value is not None}
    if route.body == "*":
        values |= _named(values.pop("body"))
    elif route.body:
        values[route.body] = _named(values[route.body])
    return operation.request(**_numbered(values))


def _numbered(value: Any) -> Any:
    """With the numbers of members of enumerations."""
    if isinstance(value, StrEnum):
        return wire.number_of(value)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: _numbered(item) for name, item in items}
    return (
        [_numbered(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value
    )


def _named(body: BaseModel) -> dict[str, Any]:
    return body.model_dump(exclude_unset=True, exclude_none=True)
