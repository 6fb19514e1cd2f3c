"""Shared by all routes: the caller, and the documents of errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request

from paceline.front.api.documents import ErrorView
from paceline.platform.transport.principal import Principal

# FastAPI would build a validator of its own for each model of each route.
_ERROR = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorView.__name__}"}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": HTTPStatus(code).phrase, "content": _ERROR}
    for code in (400, 401, 403, 404, 408, 409, 422, 429, 503, 504)
}


def caller_of(request: Request) -> Principal:
    """The caller, set by `access.guard.RestGuard`."""
    return request.state.principal


Caller = Annotated[Principal, Depends(caller_of)]
