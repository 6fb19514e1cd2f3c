"""gRPC both ways: channels with deadlines, back-off on idempotent calls, errors as statuses."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, Protocol, TypeVar

import grpc
from grpc import aio

from paceline import errors
from paceline.access import Principal, metadata_of
from paceline.callers import Guard
from paceline.config.service import ServiceSettings, TlsSettings
from paceline.errors import AuthenticationError, DeadlineError, PacelineError, UnavailableError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.reading import (
    CheckSize,
    Place,
    Read,
    parsed,
    reads_first,
    reads_one,
    reads_stream,
)
from paceline.tls import channel_credentials
from paceline.types import WorkerKind
from paceline.usage import Usage

# The largest message: a submit with a tokenizer of a large vocabulary (17 MiB and more).
MAX_MESSAGE_BYTES = 48 << 20
ERROR_KEY = "paceline-error"

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
# No message is compressed: a small one could unfold to the largest before anybody is asked who
# sent it. The bit is that of `identity`.
SERVER_OPTIONS = [
    *OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
]
# For users' clients: those that stop in the middle of a handshake, or have nothing to ask, go.
# So does after a while every connection: a client makes another by itself for its next call, and
# calls that are open have as long as a watch lasts.
PUBLIC_OPTIONS = [
    *SERVER_OPTIONS,
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
    ("grpc.max_concurrent_streams", 250),
    ("grpc.max_allowed_incoming_connections", 1_000),
]
# With less time left a call is not repeated: its deadline would hide why the one before failed.
_LEAST_S = 0.05
# A client refuses trailers of more than 8 KiB.
_MAX_DETAILS = 6_000
RETRIED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}

Request_contra = TypeVar("Request_contra", contravariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)
Reply = TypeVar("Reply")
Request = TypeVar("Request")
Admit = Callable[[str, Any], AbstractAsyncContextManager[Place]]
"""Of `/package.Service/Method` and the context of a call: open as long as the call is."""
log = Log("rpc")


class Unary(Protocol[Request_contra, Reply_co]):
    """A unary method of a generated stub."""

    def __call__(
        self, request: Request_contra, /, *, timeout: float | None = None, metadata: Any = None
    ) -> Awaitable[Reply_co]:
        """Send one message, get one."""
        ...


class ServerStream(Protocol[Request_contra, Reply_co]):
    """A server-streaming method of a generated stub."""

    def __call__(
        self, request: Request_contra, /, *, timeout: float | None = None, metadata: Any = None
    ) -> AsyncIterable[Reply_co]:
        """Send one message, get many."""
        ...


class BidiStream(Protocol[Request_contra, Reply_co]):
    """A method with streams both ways."""

    def __call__(
        self, requests: AsyncIterator[Request_contra], /, *, timeout: float | None = None
    ) -> AsyncIterable[Reply_co]:
        """Send many messages, get many."""
        ...


def connect(
    address: str,
    *,
    tls: TlsSettings | None = None,
    kind: WorkerKind = WorkerKind.EXPERIENCE,
    token: str = "",
) -> aio.Channel:
    """A channel to `host:port`; the token goes along with every call.

    With `tls` the server's certificate must be that of a service of this `kind`.

    Raises:
        ConfigError: a file of `tls` is missing or wrong.
    """
    interceptors = _token_interceptors(token) if token else []
    if tls is None:
        return aio.insecure_channel(address, options=OPTIONS, interceptors=interceptors)
    name = f"{kind}.{tls.peer_name}"
    return aio.secure_channel(
        address,
        channel_credentials(tls),
        options=[*OPTIONS, ("grpc.ssl_target_name_override", name)],
        interceptors=interceptors,
    )


def connect_as(
    settings: ServiceSettings, address: str, kind: WorkerKind = WorkerKind.EXPERIENCE
) -> aio.Channel:
    """A channel to a service of this kind, with the certificate of this process."""
    return connect(address, tls=settings.tls, kind=kind)


async def call(
    method: Unary[Request, Reply],
    request: Request,
    *,
    timeout_s: float = 10.0,
    idempotent: bool = False,
    on_behalf_of: Principal | None = None,
) -> Reply:
    """Call once, or (idempotent) again with back-off until the deadline.

    `on_behalf_of` tells the service who asked for it; without, the caller speaks for itself.

    Raises:
        PacelineError: the class that the server raised, or the one of its status.
    """
    deadline = time.monotonic() + timeout_s
    attempt = 0
    told: PacelineError | None = None
    while True:
        left = deadline - time.monotonic()
        if told is not None and left < _LEAST_S:
            raise told
        try:
            return await method(request, timeout=max(left, 0.001), **_behalf(on_behalf_of))
        except aio.AioRpcError as error:
            pause = backoff_s(attempt)
            told = translate(error)
            # A quota is there on purpose: to ask again at once changes nothing.
            final = error.code() not in RETRIED or isinstance(told, errors.QuotaError)
            left = deadline - time.monotonic()
            if not idempotent or final or pause + _LEAST_S >= left:
                raise told from None
        await asyncio.sleep(pause)
        attempt += 1


async def stream(
    method: ServerStream[Request, Reply],
    request: Request,
    *,
    timeout_s: float,
    on_behalf_of: Principal | None = None,
) -> AsyncIterator[Reply]:
    """The replies of a server stream, errors translated; `on_behalf_of` as with `call`."""
    with translated():
        async for reply in method(request, timeout=timeout_s, **_behalf(on_behalf_of)):
            yield reply


def _behalf(who: Principal | None) -> dict[str, Any]:
    return {} if who is None else {"metadata": metadata_of(who)}


async def exchange(
    method: BidiStream[Request, Reply], requests: AsyncIterator[Request], *, timeout_s: float
) -> AsyncIterator[Reply]:
    """The replies of a stream both ways, errors translated."""
    with translated():
        async for reply in method(requests, timeout=timeout_s):
            yield reply


@contextmanager
def translated() -> Any:
    """Turn gRPC errors into those of the tree."""
    try:
        yield
    except aio.AioRpcError as error:
        raise translate(error) from None


def translate(error: aio.AioRpcError) -> PacelineError:
    """The error of the tree that a gRPC error stands for."""
    metadata = dict(error.trailing_metadata() or ())
    named = {cls.__name__: cls for cls in errors.every_class()}
    cls = named.get(str(metadata.get(ERROR_KEY, "")))
    if cls is None:
        cls = _BY_STATUS.get(error.code(), PacelineError)
    return cls(error.details() or error.code().name.lower())


_BY_STATUS: dict[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.StateError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.BusyError,
    grpc.StatusCode.DATA_LOSS: errors.IntegrityError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
}


def backoff_s(
    attempt: int,
    *,
    base_s: float = 0.05,
    most_s: float = 2.0,
    chance: Callable[[], float] = random.random,
) -> float:
    """Exponential back-off with full jitter; `attempt` counts from 0."""
    return min(most_s, base_s * 2.0 ** min(attempt, 16)) * (0.5 + 0.5 * chance())


class _AddsToken:
    """Adds the bearer token to the metadata of a call."""

    def __init__(self, token: str) -> None:
        self._pair = ("authorization", f"Bearer {token}")

    async def _go(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        metadata = aio.Metadata(*(client_call_details.metadata or ()), self._pair)
        return await continuation(client_call_details._replace(metadata=metadata), request)


def _token_interceptors(token: str) -> list[Any]:
    """One interceptor for each shape of call: grpc.aio takes the first shape a class has."""
    shapes = {
        "unary_unary": aio.UnaryUnaryClientInterceptor,
        "unary_stream": aio.UnaryStreamClientInterceptor,
        "stream_unary": aio.StreamUnaryClientInterceptor,
        "stream_stream": aio.StreamStreamClientInterceptor,
    }
    made: list[Any] = []
    for shape, base in shapes.items():
        methods = {f"intercept_{shape}": _AddsToken.__dict__["_go"]}
        made.append(type(f"Token_{shape}", (_AddsToken, base), methods)(token))
    return made


class ErrorInterceptor(aio.ServerInterceptor):
    """Statuses from the error tree; what is not in the tree is logged and becomes INTERNAL.

    With a `guard` the caller's certificate decides first, then what the service has set with
    `check_first`; only then is a message read.
    """

    def __init__(
        self, *, metrics: Metrics, usage: Usage | None = None, guard: Guard | None = None
    ) -> None:
        self._metrics = metrics
        self._handle = nullcontext if usage is None else usage.handle
        self._guard = guard
        self._admit: Admit | None = None
        self._size: CheckSize | None = None

    def check_first(self, admit: Admit, size: CheckSize | None = None) -> None:
        """Ask this, which raises, before a message is read, and `size` before it is parsed."""
        self._admit = admit
        self._size = size

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        replies = "stream" if handler.response_streaming else "unary"
        requests = "stream" if handler.request_streaming else "unary"
        inner = getattr(handler, f"{requests}_{replies}")
        parse = partial(parsed, handler.request_deserializer, method, self._size)
        if handler.request_streaming:
            read = reads_stream(parse)
        elif self._guard is None and self._admit is None:
            read = reads_one(parse)
        else:
            # On the wire it is the same; but here gRPC reads the message when it is asked for.
            requests = "stream"
            read = reads_first(parse)
        wrap = self._streaming if handler.response_streaming else self._unary
        make = getattr(grpc, f"{requests}_{replies}_rpc_method_handler")
        return make(wrap(inner, read, method), response_serializer=handler.response_serializer)

    def _admitted(self, method: str, context: Any) -> AbstractAsyncContextManager[Place]:
        if self._guard is not None:
            self._guard.check(method, context)
        return nullcontext(nullcontext()) if self._admit is None else self._admit(method, context)

    def _unary(self, inner: Callable[..., Any], read: Read, method: str) -> Callable[..., Any]:
        async def run(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            started = time.perf_counter()
            outcome = "ok"
            try:
                async with self._admitted(method, context) as place:
                    with self._handle():
                        return await inner(await read(request, place), context)
            except Exception as error:  # the boundary of one call
                outcome = "error"
                await _abort(error, context, method)
            finally:
                self._count(method, outcome, time.perf_counter() - started)

        return run

    def _count(self, method: str, outcome: str, seconds: float) -> None:
        """What asks only how a process is does no work."""
        service, _, name = method.rpartition("/")
        if name == "Status" or service.startswith("/grpc.health"):
            return
        self._metrics.add("rpcs", method=name, outcome=outcome)
        self._metrics.add("rpc_seconds", seconds, method=name)

    def _streaming(self, inner: Callable[..., Any], read: Read, method: str) -> Callable[..., Any]:
        async def run(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async with self._admitted(method, context) as place:
                    replies = inner(await read(request, place), context)
                    if inspect.isawaitable(replies):  # it writes to the context itself
                        await replies
                        return
                    async for reply in replies:
                        yield reply
            except Exception as error:  # the boundary of one call
                await _abort(error, context, method)

        return run


async def _abort(error: Exception, context: aio.ServicerContext[Any, Any], method: str) -> None:
    if isinstance(error, PacelineError):
        status, text = error.grpc, error.message
    elif isinstance(error, aio.AbortError):
        raise error
    else:
        log.exception("call failed", method=method)
        status, text = grpc.StatusCode.INTERNAL, "internal error; see the log of the service"
    await context.abort(status, _sendable(text), ((ERROR_KEY, type(error).__name__),))


def _sendable(text: str) -> str:
    """As much as the trailers of a call have room for, where what is not ASCII takes threefold."""
    costs = accumulate(1 if 0x20 <= byte < 0x7F else 3 for byte in text.encode())
    num_bytes = sum(1 for _ in takewhile(lambda cost: cost <= _MAX_DETAILS, costs))
    return text.encode()[:num_bytes].decode(errors="ignore")
