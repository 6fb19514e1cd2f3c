"""gRPC clients and servers: deadlines, retries of idempotent calls, errors mapped to statuses."""

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
from paceline.config.service import ServiceSettings, TlsSettings
from paceline.enums import WorkerKind
from paceline.errors import AuthenticationError, DeadlineError, PacelineError, UnavailableError
from paceline.platform.proxies import DIRECT
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.usage import Usage
from paceline.platform.transport.job_credential import credential_of
from paceline.platform.transport.metadata_channel import Metadata, MetadataChannel
from paceline.platform.transport.principal import Principal, principal_metadata
from paceline.platform.transport.request_reader import (
    CheckSize,
    Read,
    ReadSlot,
    first_message_reader,
    parse_message,
    stream_reader,
    unary_reader,
)
from paceline.platform.transport.rpc_authorization import Guard
from paceline.platform.transport.service_keys import presented_to
from paceline.platform.transport.tls import channel_credentials

# The largest message is a submission with a large vocabulary's tokenizer (17 MiB and more).
MAX_MESSAGE_BYTES = 48 << 20
ERROR_KEY = "paceline-error"

OPTIONS: list[tuple[str, Any]] = [
    DIRECT,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Else channels to one address share a connection, and a new one the backoff of a lost one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
# No compression: a small message could expand to the largest size before its sender is
# authenticated. The only bit set is that of `identity`.
SERVER_OPTIONS = [
    *OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
]
# For users' clients: connections that stall in the handshake or idle are closed. All others are
# closed at a maximum age: clients reconnect for their next call, and open calls get as long to
# finish as a watch lasts.
PUBLIC_OPTIONS = [
    *SERVER_OPTIONS,
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
    ("grpc.max_concurrent_streams", 250),
    ("grpc.max_allowed_incoming_connections", 1_000),
]
# With less time left a call is not retried: its deadline would hide why the last attempt failed.
_MIN_ATTEMPT_S = 0.05
# A client refuses trailers of more than 8 KiB.
_MAX_DETAILS = 6_000
RETRIED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}

Request_contra = TypeVar("Request_contra", contravariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)
Reply = TypeVar("Reply")
Request = TypeVar("Request")
Admit = Callable[[str, Any], AbstractAsyncContextManager[ReadSlot]]
"""Takes `/package.Service/Method` and the context of a call; stays open for as long as the call."""
Authorize = Callable[[str, Any, Any], Awaitable[None]]
"""Takes `/package.Service/Method`, the context and the request of a call; raises to refuse it."""
log = Log("rpc")


class Unary(Protocol[Request_contra, Reply_co]):
    """A unary method of a generated stub."""

    def __call__(
        self, request: Request_contra, /, *, timeout: float | None = None, metadata: Any = None
    ) -> Awaitable[Reply_co]:
        """Send one message, receive one."""
        ...


class ServerStream(Protocol[Request_contra, Reply_co]):
    """A server-streaming method of a generated stub."""

    def __call__(
        self, request: Request_contra, /, *, timeout: float | None = None, metadata: Any = None
    ) -> AsyncIterable[Reply_co]:
        """Send one message, receive many."""
        ...


class BidiStream(Protocol[Request_contra, Reply_co]):
    """A bidirectional streaming method of a generated stub."""

    def __call__(
        self, requests: AsyncIterator[Request_contra], /, *, timeout: float | None = None
    ) -> AsyncIterable[Reply_co]:
        """Send many messages, receive many."""
        ...


def connect(
    address: str,
    *,
    tls: TlsSettings | None = None,
    kind: WorkerKind = WorkerKind.EXPERIENCE,
    token: str = "",
    metadata: Metadata = (),
) -> aio.Channel:
    """A channel to `host:port` that sends `token` and `metadata` with every call.

    With `tls` the server's certificate must name this `kind` of service.

    Raises:
        ConfigError: a file of `tls` is missing or wrong.
    """
    if token:
        metadata = (*metadata, ("authorization", f"Bearer {token}"))
    if tls is None:
        channel = aio.insecure_channel(address, options=OPTIONS)
    else:
        name = f"{kind}.{tls.peer_name}"
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
        channel = aio.secure_channel(address, channel_credentials(tls), options=options)
    return MetadataChannel(channel, metadata) if metadata else channel


def connect_as(
    settings: ServiceSettings, address: str, kind: WorkerKind = WorkerKind.EXPERIENCE
) -> aio.Channel:
    """A channel to a service of this kind, to which this process proves its own kind.

    The experience service also gets the credential of a worker that belongs to a job.

    Raises:
        ConfigError: a file of `tls`, `service_keys` or `credential` is missing or wrong.
    """
    token = credential_of(settings) if kind is WorkerKind.EXPERIENCE else ""
    metadata = presented_to(settings, kind)
    return connect(address, tls=settings.tls, kind=kind, token=token, metadata=metadata)


async def call(
    method: Unary[Request, Reply],
    request: Request,
    *,
    timeout_s: float = 10.0,
    idempotent: bool = False,
    on_behalf_of: Principal | None = None,
) -> Reply:
    """Call once, or if `idempotent` retry with backoff until the deadline.

    `on_behalf_of` is the principal to pass on; without it the service acts for itself.

    Raises:
        PacelineError: the class that the server raised, or else the one of the gRPC status.
    """
    deadline = time.monotonic() + timeout_s
    attempt = 0
    failure: PacelineError | None = None
    while True:
        left = deadline - time.monotonic()
        if failure is not None and left < _MIN_ATTEMPT_S:
            raise failure
        try:
            return await method(request, timeout=max(left, 0.001), **on_behalf(on_behalf_of))
        except aio.AioRpcError as error:
            pause = backoff_s(attempt)
            failure = translate(error)
            # A quota limits on purpose, and what is pending has been waited for: an immediate retry
            # changes nothing.
            told = isinstance(failure, (errors.QuotaError, errors.PendingError))
            final = told or error.code() not in RETRIED
            left = deadline - time.monotonic()
            if not idempotent or final or pause + _MIN_ATTEMPT_S >= left:
                raise failure from None
        await asyncio.sleep(pause)
        attempt += 1


async def stream(
    method: ServerStream[Request, Reply],
    request: Request,
    *,
    timeout_s: float,
    on_behalf_of: Principal | None = None,
) -> AsyncIterator[Reply]:
    """The replies of a server stream, errors translated; `on_behalf_of` as in `call`."""
    with translated():
        async for reply in method(request, timeout=timeout_s, **on_behalf(on_behalf_of)):
            yield reply


def on_behalf(principal: Principal | None) -> dict[str, Any]:
    """Arguments of a call that acts for a user."""
    return {} if principal is None else {"metadata": principal_metadata(principal)}


async def exchange(
    method: BidiStream[Request, Reply], requests: AsyncIterator[Request], *, timeout_s: float
) -> AsyncIterator[Reply]:
    """The replies of a bidirectional stream, errors translated."""
    with translated():
        async for reply in method(requests, timeout=timeout_s):
            yield reply


@contextmanager
def translated() -> Any:
    """Translate gRPC errors into `PacelineError`s."""
    try:
        yield
    except aio.AioRpcError as error:
        raise translate(error) from None


def translate(error: aio.AioRpcError) -> PacelineError:
    """The `PacelineError` for a gRPC error."""
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
    max_s: float = 2.0,
    rng: Callable[[], float] = random.random,
) -> float:
    """Exponential backoff with jitter; `attempt` counts from 0, `rng` draws from [0, 1)."""
    return min(max_s, base_s * 2.0 ** min(attempt, 16)) * (0.5 + 0.5 * rng())


class ErrorInterceptor(aio.ServerInterceptor):
    """Maps `PacelineError`s to statuses; any other exception is logged and becomes INTERNAL.

    A `guard` checks the kind of the caller first, then what the service has set with
    `check_first` runs; only then is a message read. What it has set with `authorize` sees the
    message before the method does.
    """

    def __init__(
        self, *, metrics: Metrics, usage: Usage | None = None, guard: Guard | None = None
    ) -> None:
        self._metrics = metrics
        self._handle = nullcontext if usage is None else usage.handle
        self._guard = guard
        self._admit: Admit | None = None
        self._size: CheckSize | None = None
        self._authorize: Authorize | None = None
        self._wrapped: dict[str, tuple[Any, Any]] = {}  # by method: its handler, and ours

    def check_first(self, admit: Admit, size: CheckSize | None = None) -> None:
        """Run `admit` before a message is read and `size` before it is parsed; both may raise."""
        self._admit = admit
        self._size = size
        self._wrapped.clear()

    def authorize(self, check: Authorize) -> None:
        """Run `check` on every request before its method; a stream of requests is not read yet."""
        self._authorize = check

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
        own, wrapped = self._wrapped.get(method, (None, None))
        if own is not handler:
            wrapped = self._wrap(handler, method)
            self._wrapped[method] = (handler, wrapped)
        return wrapped

    def _wrap(self, handler: Any, method: str) -> Any:
        replies = "stream" if handler.response_streaming else "unary"
        requests = "stream" if handler.request_streaming else "unary"
        inner = getattr(handler, f"{requests}_{replies}")
        parse = partial(parse_message, handler.request_deserializer, method, self._size)
        if handler.request_streaming:
            read = stream_reader(parse)
        elif self._guard is None and self._admit is None:
            read = unary_reader(parse)
        else:
            # The same on the wire, but as a stream gRPC reads the message only when asked to.
            requests = "stream"
            read = first_message_reader(parse)
        wrap = self._streaming if handler.response_streaming else self._unary
        make = getattr(grpc, f"{requests}_{replies}_rpc_method_handler")
        return make(wrap(inner, read, method), response_serializer=handler.response_serializer)

    def _admitted(self, method: str, context: Any) -> AbstractAsyncContextManager[ReadSlot]:
        if self._guard is not None:
            self._guard.check(method, context)
        return nullcontext(nullcontext()) if self._admit is None else self._admit(method, context)

    async def _authorized(self, method: str, context: Any, reading: Awaitable[Any]) -> Any:
        message = await reading
        if self._authorize is not None:
            await self._authorize(method, context, message)
        return message

    def _unary(self, inner: Callable[..., Any], read: Read, method: str) -> Callable[..., Any]:
        async def run(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            started = time.perf_counter()
            outcome = "ok"
            try:
                async with self._admitted(method, context) as slot:
                    with self._handle():
                        message = await self._authorized(method, context, read(request, slot))
                        return await inner(message, context)
            except Exception as error:  # the supervisor boundary of one call
                outcome = "error"
                await _abort(error, context, method)
            finally:
                self._count(method, outcome, time.perf_counter() - started)

        return run

    def _count(self, method: str, outcome: str, seconds: float) -> None:
        """Count a call, unless it only asks for health or status."""
        service, _, name = method.rpartition("/")
        if name == "Status" or service.startswith("/grpc.health"):
            return
        self._metrics.add("rpcs", method=name, outcome=outcome)
        self._metrics.add("rpc_seconds", seconds, method=name)

    def _streaming(self, inner: Callable[..., Any], read: Read, method: str) -> Callable[..., Any]:
        async def run(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async with self._admitted(method, context) as slot:
                    message = await self._authorized(method, context, read(request, slot))
                    replies = inner(message, context)
                    if inspect.isawaitable(replies):  # the handler writes to the context itself
                        await replies
                        return
                    async for reply in replies:
                        yield reply
            except Exception as error:  # the supervisor boundary of one call
                await _abort(error, context, method)

        return run


async def _abort(error: Exception, context: aio.ServicerContext[Any, Any], method: str) -> None:
    if isinstance(error, PacelineError):
        status, text = grpc.StatusCode[error.grpc], error.message
    elif isinstance(error, aio.AbortError):
        raise error
    else:
        log.exception("call failed", method=method)
        status, text = grpc.StatusCode.INTERNAL, "internal error; see the log of the service"
    await context.abort(status, _truncate(text), ((ERROR_KEY, type(error).__name__),))


def _truncate(text: str) -> str:
    """Truncate a text to what fits in the trailers; each non-ASCII byte takes three there."""
    costs = accumulate(1 if 0x20 <= byte < 0x7F else 3 for byte in text.encode())
    num_bytes = sum(1 for _ in takewhile(lambda cost: cost <= _MAX_DETAILS, costs))
    return text.encode()[:num_bytes].decode(errors="ignore")
