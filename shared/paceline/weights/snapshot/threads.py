"""Runs work in a thread that never outlives its caller, whose memory it may use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


async def in_thread(function: Callable[[Unpack[Args]], Result], *args: *Args) -> Result:
    """Like `asyncio.to_thread`, but a cancelled caller waits until the thread is done."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            # Awaited indirectly, since a second cancellation would abandon the thread.
            try:
                await asyncio.wait({working})
            except asyncio.CancelledError:
                continue
        if not working.cancelled():
            working.exception()
        raise
