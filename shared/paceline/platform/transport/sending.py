"""Calls that send a stream of messages and receive one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from grpc import aio

from paceline.errors import DeadlineError
from paceline.platform.transport.principal import Principal
from paceline.platform.transport.rpc import on_behalf, translated

ACCEPTED = ("paceline-accepted", "1")
Request_contra = TypeVar("Request_contra", contravariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)
Reply = TypeVar("Reply")
Request = TypeVar("Request")


class Sending(Protocol[Request_contra, Reply_co]):
    """A call of a client-streaming method."""

    async def write(self, request: Request_contra, /) -> None:
        """Send one message."""
        ...

    async def done_writing(self) -> None:
        """Send no more."""
        ...

    async def initial_metadata(self) -> Any:
        """Wait for the server's initial metadata, or the end of the call."""
        ...

    def cancel(self) -> bool:
        """Give it up, unless it has ended."""
        ...

    def __await__(self) -> Generator[Any, None, Reply_co]:
        """Wait for the reply."""
        ...


class ClientStream(Protocol[Request_contra, Reply_co]):
    """A client-streaming method of a generated stub."""

    def __call__(
        self, *, timeout: float | None = None, metadata: Any = None
    ) -> Sending[Request_contra, Reply_co]:
        """Send many messages, receive one."""
        ...


async def send(
    method: ClientStream[Request, Reply],
    requests: AsyncIterator[Request],
    *,
    timeout_s: float,
    message_s: float = 30.0,
    on_behalf_of: Principal | None = None,
    metadata: Sequence[tuple[str, str]] = (),
    waits: bool = False,
) -> Reply:
    """Send a stream of messages, each within `message_s`; returns the reply.

    A reply that comes early ends it. An error of `requests` is raised, and the call cancelled.
    With `waits` nothing is sent until the server has called `accept`: gRPC may lose the reason of a
    refusal that meets a message on its way.

    Raises:
        DeadlineError: the server does not take a message for so long.
        PacelineError: as `call`.
    """
    with translated():
        pairs = [*on_behalf(on_behalf_of).get("metadata", ()), *metadata]
        sending = method(timeout=timeout_s, metadata=pairs)
        try:
            if waits and ACCEPTED not in [*(await sending.initial_metadata() or ())]:
                return await sending
            # It has been answered: the reply says why, the error of the write does not.
            with suppress(asyncio.InvalidStateError, aio.AioRpcError):
                async for request in requests:
                    try:
                        async with asyncio.timeout(message_s):
                            await sending.write(request)
                    except TimeoutError:
                        text = f"a message was not taken within {message_s:g} s"
                        raise DeadlineError(text) from None
                await sending.done_writing()
            return await sending
        finally:
            sending.cancel()


async def accept(context: Any) -> None:
    """Tell a client that waits for it that its messages will be read."""
    await context.send_initial_metadata((ACCEPTED,))
