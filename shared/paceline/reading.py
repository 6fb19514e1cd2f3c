"""How a server reads messages of calls: as bytes, parsed where faults of callers are told apart."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError

from paceline.errors import DeadlineError, InvalidError

# For one message to arrive.
READ_S = 30.0
CheckSize = Callable[[str, bytes], None]
"""Of `/package.Service/Method` and a message that is not parsed yet."""


def reads_one(inner: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    """A method that is given bytes: what is no message is a fault of the caller."""

    def run(data: bytes, context: Any) -> Any:
        return inner(parse(data), context)

    return run


def reads_first(inner: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    """A method that is given a stream of which only the first message counts."""

    async def run(requests: AsyncIterable[bytes], context: Any) -> Any:
        return await inner(parse(await _first_of(requests)), context)

    return run


def reads_first_streaming(
    inner: Callable[..., Any], parse: Callable[[bytes], Any]
) -> Callable[..., Any]:
    """As `reads_first`, for a method with many replies."""

    async def run(requests: AsyncIterable[bytes], context: Any) -> AsyncIterator[Any]:
        replies = inner(parse(await _first_of(requests)), context)
        if inspect.isawaitable(replies):  # it writes to the context itself
            await replies
            return
        async for reply in replies:
            yield reply

    return run


async def _first_of(requests: AsyncIterable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            async for data in requests:
                return data
    except TimeoutError:
        raise DeadlineError(f"message: was not sent within {READ_S:g} s") from None
    raise InvalidError("message: is missing")


def reads_stream(inner: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    """A method that is given a stream of bytes."""

    async def messages(requests: AsyncIterable[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield parse(data)

    def run(requests: AsyncIterable[bytes], context: Any) -> Any:
        return inner(messages(requests), context)

    return run


def parsed(parse: Callable[[bytes], Any], method: str, size: CheckSize | None, data: bytes) -> Any:
    """The message in `data`.

    Raises:
        InvalidError: it is too large, or no such message.
    """
    if size is not None:
        size(method, data)
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidError(f"message: {error}") from None
