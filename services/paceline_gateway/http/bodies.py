"""Reads bodies of REST requests whole, within limits, before anything parses them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.config.documents import read_json
from paceline.config.quota import MAX_CODE_BYTES, MAX_SPEC_BYTES
from paceline.errors import InvalidError
from paceline_gateway.http.error_responses import error_response, response_of
from paceline_gateway.job_api import too_large

# Limit for routes that are not in `LARGER`.
MAX_BODY_BYTES = 16 << 10
LARGER: Mapping[str, int] = {"POST /v1/jobs": MAX_SPEC_BYTES, "POST /v1/code": MAX_CODE_BYTES}
BODY_TIMEOUT_S = 30.0
_NO_BODY = frozenset({"GET", "HEAD", "DELETE"})


class _Disconnected(Exception):
    """The client has disconnected."""


class RequestBodies:
    """Middleware that passes on requests with a complete, uncompressed body of bounded size.

    The body of every route but those in `LARGER` must be JSON.
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

    async def _read(self, headers: Headers, action: str, receive: Receive) -> bytes:
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            raise InvalidError(
                f"content-encoding: {encoding[:80]!r} is not accepted; send the body as it is"
            )
        limit = LARGER.get(action, MAX_BODY_BYTES)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise _too_large(action, limit)
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


def _too_large(action: str, limit: int) -> InvalidError:
    if action == "POST /v1/jobs":
        return too_large()
    return InvalidError(f"body: is too large; at most {limit} bytes are allowed")
