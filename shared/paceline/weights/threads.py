"""Work in threads that is never left alone with memory of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


async def in_thread(function: Callable[[Unpack[Args]], Result], *args: *Args) -> Result:
    """As `asyncio.to_thread`, but whoever is cancelled meanwhile ends only when the work has."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            # Not awaited directly: a second cancellation would leave the thread behind.
            try:
                await asyncio.wait({working})
            except asyncio.CancelledError:
                continue
        if not working.cancelled():
            working.exception()
        raise
