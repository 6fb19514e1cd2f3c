"""How a server reads messages of calls: as bytes, parsed where faults of callers are told apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from google.protobuf.message import DecodeError

from paceline.errors import DeadlineError, InvalidError

# For one message to arrive.
READ_S = 30.0
CheckSize = Callable[[str, bytes], None]
"""Of `/package.Service/Method` and a message that is not parsed yet."""
Place = AbstractAsyncContextManager[Any]
"""Held while a message arrives."""
Read = Callable[[Any, Place], Awaitable[Any]]
"""What a method is given, from what gRPC has."""


def reads_one(parse: Callable[[bytes], Any]) -> Read:
    """From bytes: what is no message is a fault of the caller."""

    async def read(data: bytes, place: Place) -> Any:
        return parse(data)

    return read


def reads_first(parse: Callable[[bytes], Any]) -> Read:
    """From a stream of bytes of which only the first counts."""

    async def read(requests: AsyncIterable[bytes], place: Place) -> Any:
        async with place:
            return parse(await _first_of(requests))

    return read


def reads_stream(parse: Callable[[bytes], Any]) -> Read:
    """From a stream of bytes, one after the other."""

    async def messages(requests: AsyncIterable[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield parse(data)

    async def read(requests: AsyncIterable[bytes], place: Place) -> Any:
        return messages(requests)

    return read


async def _first_of(requests: AsyncIterable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            async for data in requests:
                return data
    except TimeoutError:
        raise DeadlineError(f"message: was not sent within {READ_S:g} s") from None
    raise InvalidError("message: is missing")


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
