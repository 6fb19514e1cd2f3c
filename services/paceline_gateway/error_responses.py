"""Errors as REST responses: a status, and JSON with the type and the message of the error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.responses import JSONResponse

from paceline.errors import InvalidError, NotFoundError, PacelineError, RateError


def error_response(kind: type[Exception], message: str, status: int) -> JSONResponse:
    """A response with a status of its own."""
    body = {"error": {"type": kind.__name__, "message": message}}
    return JSONResponse(body, status_code=status)


def response_of(error: PacelineError) -> JSONResponse:
    """The response to an error, with the status of its class."""
    response = error_response(type(error), error.message, error.http)
    if error.http == 401:
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, RateError):
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return response


def no_route(method: str, path: str, allowed: Sequence[str]) -> JSONResponse:
    """404, or 405 if the path is served with other methods: those of `allowed`."""
    if not allowed:
        return error_response(NotFoundError, f"{method} {path}: Not Found", 404)
    response = error_response(InvalidError, f"{method} {path}: Method Not Allowed", 405)
    response.headers["allow"] = ", ".join(allowed)
    return response
