"""Stands before everything: REST as the outermost layer, gRPC around every servicer."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.access import Principal, Role
from paceline.errors import BusyError, InvalidError, NotFoundError, PacelineError
from paceline.reading import Place
from paceline.rpc import Admit
from paceline_gateway.auth import FRESH_S, Door
from paceline_gateway.messages import LARGE
from paceline_gateway.rules import Routes, least_of

# An answer goes out in pieces of this size, so that its call is open until the client has read it.
PIECE_BYTES = 64 << 10
HEALTH = "grpc.health.v1.Health/Check"
# Of a tenant over gRPC: calls with large messages, and messages of other calls that arrive.
LARGE_AT_ONCE = 2
READS_AT_ONCE = 4


class _Cut(Exception):
    """An open answer ends: its token opens nothing any more."""


class RestGuard:
    """Serves only routes with a rule, and only who may; puts the caller into the request's state.

    Every piece of a stream that comes some seconds after the last check is checked again, so
    that a revoked token also ends what is open.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        door: Door,
        routes: Routes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._door = door
        self._routes = routes or Routes()
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        found = self._routes.find(method, path)
        if found is None:
            await self._absent(method, path)(scope, receive, send)
            return
        action, least = found
        if least is None:
            await self._app(scope, receive, send)
            return
        check = self._check_of(scope, least, action)
        try:
            who = await check()
            scope.setdefault("state", {}).update(principal=who, action=action)
        except PacelineError as error:
            await refusal(error)(scope, receive, send)
            return
        try:
            with self._door.open(who):
                await self._app(scope, receive, self._watched(send, check))
        except BusyError as error:
            await refusal(error)(scope, receive, send)
        except _Cut:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _check_of(self, scope: Scope, least: Role, action: str) -> Callable[[], Any]:
        given = Headers(scope=scope).get("authorization", "")
        # The peer itself: what headers say about others is anybody's to write.
        source = (scope.get("client") or ("",))[0]
        return lambda: self._door.enter(given, least, source=source, action=action)

    def _watched(self, send: Send, check: Callable[[], Any]) -> Send:
        checked = self._clock()

        async def watched(message: Message) -> None:
            nonlocal checked
            if message["type"] == "http.response.body" and self._clock() - checked > FRESH_S:
                try:
                    await check()
                except PacelineError:
                    raise _Cut from None
                checked = self._clock()
            await _in_pieces(send, message)

        return watched

    def _absent(self, method: str, path: str) -> JSONResponse:
        allowed = self._routes.methods(path)
        if not allowed:
            return answer(NotFoundError, f"{method} {path}: Not Found", 404)
        made = answer(InvalidError, f"{method} {path}: Method Not Allowed", 405)
        made.headers["allow"] = ", ".join(allowed)
        return made


async def _in_pieces(send: Send, message: Message) -> None:
    body = message.get("body", b"")
    last = max(0, len(body) - 1) // PIECE_BYTES * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        await send({**message, "body": piece, "more_body": True})
    await send({**message, "body": body[last:]} if last else message)


def answer(kind: type[Exception], message: str, status: int) -> JSONResponse:
    """An error as REST tells it."""
    body = {"error": {"type": kind.__name__, "message": message}}
    return JSONResponse(body, status_code=status)


def refusal(error: PacelineError) -> JSONResponse:
    """An error of the tree as REST tells it."""
    made = answer(type(error), error.message, error.http)
    if error.http == 401:
        made.headers["www-authenticate"] = "Bearer"
    return made


class GrpcGuard:
    """A servicer as gRPC wants it, around one whose methods take a message and who calls.

    There is no other way to these methods: one without a rule is refused, one that would not
    ask who calls cannot be called.
    """

    def __init__(
        self,
        servicer: object,
        *,
        service: str,
        door: Door,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servicer = servicer
        self._service = service
        self._door = door
        self._clock = clock

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)
        action = f"{self._service}/{name}"
        wrap = self._streaming if inspect.isasyncgenfunction(method) else self._unary
        return wrap(method, action)

    async def _enter(self, context: Any, action: str) -> Principal:
        return await enter(self._door, context, action)

    def _unary(self, method: Callable[..., Any], action: str) -> Callable[..., Any]:
        async def run(request: Any, context: Any) -> Any:
            return await method(request, await self._enter(context, action))

        return run

    def _streaming(self, method: Callable[..., Any], action: str) -> Callable[..., Any]:
        async def run(request: Any, context: Any) -> AsyncIterator[Any]:
            who = await self._enter(context, action)
            checked = self._clock()
            async for reply in method(request, who):
                if self._clock() - checked > FRESH_S:
                    await self._enter(context, action)
                    checked = self._clock()
                yield reply

        return run


async def enter(door: Door, context: Any, action: str) -> Principal:
    """Who makes a gRPC call, if they may; `action` is `package.Service/Method`."""
    pairs = {str(key): value for key, value in context.invocation_metadata() or ()}
    return await door.enter(
        str(pairs.get("authorization", "")),
        least_of(action),
        source=host_of(context.peer()),
        action=action,
    )


def before_reading(door: Door) -> Admit:
    """For the interceptor: who may not call gets that answer whatever their message is.

    Of a tenant a few messages arrive at a time: until it is there, any may be of the largest size.
    """
    places: dict[tuple[str, bool], asyncio.Semaphore] = {}

    @asynccontextmanager
    async def admit(method: str, context: Any) -> AsyncGenerator[Place]:
        action = method.removeprefix("/")
        # For probes; `Watch` would keep a connection open for anybody, and has no rule.
        if action == HEALTH:
            yield nullcontext()
            return
        who = await enter(door, context, action)
        with door.open(who):
            large = method in LARGE
            room = LARGE_AT_ONCE if large else READS_AT_ONCE
            place = places.setdefault((who.tenant, large), asyncio.Semaphore(room))
            if not large:
                yield place
                return
            async with place:  # what is large stays in memory until it is handed over
                yield nullcontext()

    return admit


def host_of(peer: str) -> str:
    """The host in what gRPC says of a peer: `ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`, `unix:`."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind.startswith("ip") else kind
