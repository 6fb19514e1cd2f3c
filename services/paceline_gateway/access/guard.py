"""Authentication middleware: for REST an ASGI layer, for gRPC a wrapper around every method."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import BusyError, PacelineError
from paceline.platform.transport.operations import Operation
from paceline.platform.transport.principal import Principal, Role
from paceline.platform.transport.request_reader import ReadSlot
from paceline.platform.transport.rpc import Admit
from paceline_gateway.access.authentication import FRESH_S, Authenticator
from paceline_gateway.access.rules import Routes, required_role
from paceline_gateway.error_responses import no_route, response_of
from paceline_gateway.messages import is_large

# A response is sent in pieces of this size, so that its call counts as open until it is read.
PIECE_BYTES = 64 << 10
HEALTH = "grpc.health.v1.Health/Check"
# Per tenant over gRPC: calls with large messages, and other messages that are being received.
MAX_LARGE_CALLS = 2
MAX_READS = 4


class _TokenEnded(Exception):
    """The token of an open response is no longer valid."""


class RestGuard:
    """Serves only routes with a rule, to authorized callers; sets `principal` in the request state.

    A stream is checked again every few seconds, so that revoking a token also ends open streams.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        routes: Routes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._routes = routes or Routes()
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        rule = self._routes.find(method, path)
        if rule is None:
            await no_route(method, path, self._routes.methods(path))(scope, receive, send)
            return
        action, role = rule
        if role is None:
            await self._app(scope, receive, send)
            return
        check = self._check_of(scope, role, action)
        try:
            who = await check()
            scope.setdefault("state", {}).update(principal=who, action=action)
        except PacelineError as error:
            await response_of(error)(scope, receive, send)
            return
        try:
            with self._authenticator.track_call(who, action):
                await self._app(scope, receive, self._rechecked(send, check))
        except BusyError as error:
            await response_of(error)(scope, receive, send)
        except _TokenEnded:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _check_of(self, scope: Scope, role: Role, action: str) -> Callable[[], Any]:
        authorization = Headers(scope=scope).get("authorization", "")
        # The peer address itself: forwarding headers can be forged.
        source = (scope.get("client") or ("",))[0]
        return lambda: self._authenticator.authorize(
            authorization, role, source=source, action=action
        )

    def _rechecked(self, send: Send, check: Callable[[], Any]) -> Send:
        checked = self._clock()

        async def rechecked(message: Message) -> None:
            nonlocal checked
            if message["type"] == "http.response.body" and self._clock() - checked > FRESH_S:
                try:
                    await check()
                except PacelineError:
                    raise _TokenEnded from None
                checked = self._clock()
            await _in_pieces(send, message)

        return rechecked


async def _in_pieces(send: Send, message: Message) -> None:
    body = message.get("body", b"")
    last = max(0, len(body) - 1) // PIECE_BYTES * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        await send({**message, "body": piece, "more_body": True})
    await send({**message, "body": body[last:]} if last else message)


class GrpcGuard:
    """Wraps the handlers of operations as gRPC methods that authenticate their callers."""

    def __init__(
        self, *, authenticator: Authenticator, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._authenticator = authenticator
        self._clock = clock

    def wrap(self, handler: Callable[..., Any], each: Operation) -> Callable[..., Any]:
        """A gRPC method `(request, context)` from a handler `(request, principal)`."""
        return (self._streaming if each.streams_replies else self._unary)(handler, each.action)

    async def _authorize(self, context: Any, action: str) -> Principal:
        return await authorize(self._authenticator, context, action)

    def _unary(self, handler: Callable[..., Any], action: str) -> Callable[..., Any]:
        async def run(request: Any, context: Any) -> Any:
            return await handler(request, await self._authorize(context, action))

        return run

    def _streaming(self, handler: Callable[..., Any], action: str) -> Callable[..., Any]:
        async def run(request: Any, context: Any) -> AsyncIterator[Any]:
            who = await self._authorize(context, action)
            checked = self._clock()
            async for reply in handler(request, who):
                if self._clock() - checked > FRESH_S:
                    await self._authorize(context, action)
                    checked = self._clock()
                yield reply

        return run


async def authorize(authenticator: Authenticator, context: Any, action: str) -> Principal:
    """The caller of a gRPC method, if authorized; `action` is `package.Service/Method`."""
    pairs = {str(key): value for key, value in context.invocation_metadata() or ()}
    return await authenticator.authorize(
        str(pairs.get("authorization", "")),
        required_role(action),
        source=host_of(context.peer()),
        action=action,
    )


def before_reading(authenticator: Authenticator) -> Admit:
    """For the interceptor: reject unauthorized callers before their message is read.

    Only a few messages per tenant are received at a time: each may turn out to be a large one.
    """
    semaphores: dict[tuple[str, bool], asyncio.Semaphore] = {}

    @asynccontextmanager
    async def admit(method: str, context: Any) -> AsyncGenerator[ReadSlot]:
        action = method.removeprefix("/")
        # For probes; `Watch` would let anybody keep a connection open, and has no rule.
        if action == HEALTH:
            yield nullcontext()
            return
        who = await authorize(authenticator, context, action)
        with authenticator.track_call(who, action):
            large = is_large(method)
            limit = MAX_LARGE_CALLS if large else MAX_READS
            semaphore = semaphores.setdefault((who.tenant, large), asyncio.Semaphore(limit))
            if not large:
                yield semaphore
                return
            async with semaphore:  # a large message stays in memory until it is forwarded
                yield nullcontext()

    return admit


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer: `ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`, `unix:`."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind.startswith("ip") else kind
