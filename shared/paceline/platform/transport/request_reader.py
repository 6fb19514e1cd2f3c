"""Reads the messages of a call as bytes and parses them; a malformed one is INVALID_ARGUMENT."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from paceline.errors import DeadlineError, InvalidError

# Time limit for one message to arrive.
READ_TIMEOUT_S = 30.0
Request = TypeVar("Request")
CheckSize = Callable[[str, bytes], None]
"""Takes `/package.Service/Method` and an unparsed message; raises if it is too large."""
ReadSlot = AbstractAsyncContextManager[Any]
"""Held while a message arrives: bounds how many are being received at once."""
Read = Callable[[Any, ReadSlot], Awaitable[Any]]
"""Turns the raw request or requests of gRPC into the argument of a handler."""


def unary_reader(parse: Callable[[bytes], Any]) -> Read:
    """For a unary request that gRPC has already received."""

    async def read(data: bytes, slot: ReadSlot) -> Any:
        return parse(data)

    return read


def first_message_reader(parse: Callable[[bytes], Any]) -> Read:
    """For a unary request not received yet, read as the first message of a stream."""

    async def read(requests: AsyncIterable[bytes], slot: ReadSlot) -> Any:
        async with slot:
            return parse(await _first_of(requests))

    return read


def stream_reader(parse: Callable[[bytes], Any]) -> Read:
    """For a stream of requests, parsed one at a time."""

    async def messages(requests: AsyncIterable[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield parse(data)

    async def read(requests: AsyncIterable[bytes], slot: ReadSlot) -> Any:
        return messages(requests)

    return read


async def timely(
    requests: AsyncIterable[Request], timeout_s: float = READ_TIMEOUT_S
) -> AsyncIterator[Request]:
    """The messages of a stream, each of which may take so long.

    Raises:
        DeadlineError: one took longer.
    """
    arriving = aiter(requests)
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                each = await anext(arriving)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlineError(f"message: nothing was sent for {timeout_s:g} s") from None
        yield each


async def _first_of(requests: AsyncIterable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for data in requests:
                return data
    except TimeoutError:
        raise DeadlineError(f"message: was not sent within {READ_TIMEOUT_S:g} s") from None
    raise InvalidError("message: is missing")


def parse_message(
    parse: Callable[[bytes], Any], method: str, size: CheckSize | None, data: bytes
) -> Any:
    """The message in `data`.

    Raises:
        InvalidError: it is too large or malformed.
    """
    if size is not None:
        size(method, data)
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidError(f"message: {error}") from None
