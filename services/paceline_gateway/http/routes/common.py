"""Shared by all routes: the caller, and the documents of errors."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from paceline.api.documents import ErrorView
from paceline.transport.principal import Principal

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorView} for code in (400, 401, 403, 404, 408, 409, 422, 429, 503, 504)
}


def caller_of(request: Request) -> Principal:
    """The caller, set by `access.guard.RestGuard`."""
    return request.state.principal


Caller = Annotated[Principal, Depends(caller_of)]
