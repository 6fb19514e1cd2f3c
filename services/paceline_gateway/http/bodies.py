"""Reads bodies of REST requests within limits: whole before anything parses them, or in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.config.documents import read_json
from paceline.config.quota import MAX_CODE_BYTES, MAX_SPEC_BYTES
from paceline.errors import InvalidError
from paceline_gateway.error_responses import error_response, response_of
from paceline_gateway.job_api import too_large

# Limit for routes that are not in `LARGER`.
MAX_BODY_BYTES = 16 << 10
LARGER: Mapping[str, int] = {
    "POST /v1/jobs": MAX_SPEC_BYTES,
    "POST /v1/jobs/{job_id}/replay": MAX_SPEC_BYTES,
}
# The handler reads the body as it arrives.
STREAMED: Mapping[str, int] = {"POST /v1/code": MAX_CODE_BYTES}
BODY_TIMEOUT_S = 30.0
_NO_BODY = frozenset({"GET", "HEAD", "DELETE"})


class _Disconnected(Exception):
    """The client has disconnected."""


class LateError(InvalidError):
    """Nothing of a body has been sent for too long."""

    http = 408


class RequestBodies:
    """Middleware that passes on requests with a complete, uncompressed body of bounded size.

    The body of every route but those in `LARGER` and `STREAMED` must be JSON. That of a route in
    `STREAMED` is not complete: reading it raises `InvalidError` if it is too large, or late.
    """

    def __init__(self, app: ASGIApp, *, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; `scope["state"]["action"]` is its route."""
        if scope["type"] != "http" or scope["method"] in _NO_BODY:
            await self._app(scope, receive, send)
            return
        action = scope.get("state", {}).get("action", "")
        try:
            if (limit := STREAMED.get(action)) is not None:
                _check_headers(Headers(scope=scope), action, limit)
                await self._app(scope, self._bounded(receive, action, limit), send)
                return
            body = await self._read(Headers(scope=scope), action, receive)
        except InvalidError as error:
            await response_of(error)(scope, receive, send)
            return
        except TimeoutError:
            text = f"body: was not sent within {self._timeout_s:g} s"
            await error_response(InvalidError, text, 408)(scope, receive, send)
            return
        except _Disconnected:
            return
        delivered = False

        async def replay() -> Message:
            nonlocal delivered
            if delivered:
                return await receive()
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _bounded(self, receive: Receive, action: str, limit: int) -> Receive:
        total, ended = 0, False

        async def bounded() -> Message:
            nonlocal total, ended
            if ended:
                return await receive()
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await receive()
            except TimeoutError:
                text = f"body: nothing was sent for {self._timeout_s:g} s"
                raise LateError(text) from None
            total += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if total > limit:
                raise _too_large(action, limit)
            return message

        return bounded

    async def _read(self, headers: Headers, action: str, receive: Receive) -> bytes:
        limit = LARGER.get(action, MAX_BODY_BYTES)
        _check_headers(headers, action, limit)
        body = bytearray()
        async with asyncio.timeout(self._timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Disconnected
                body += message.get("body", b"")
                if len(body) > limit:
                    raise _too_large(action, limit)
                if not message.get("more_body", False):
                    break
        if body and action not in LARGER:
            read_json(bytes(body), what="body")
        return bytes(body)


def _check_headers(headers: Headers, action: str, limit: int) -> None:
    if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
        raise InvalidError(
            f"content-encoding: {encoding[:80]!r} is not accepted; send the body as it is"
        )
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise _too_large(action, limit)


def _too_large(action: str, limit: int) -> InvalidError:
    if action == "POST /v1/jobs":
        return too_large()
    return InvalidError(f"body: is too large; at most {limit} bytes are allowed")
