"""A signal that wakes all tasks waiting for a change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Signal:
    """Wakes all waiters. To miss nothing: take the event, check the condition, then wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def event(self) -> asyncio.Event:
        """Set at the next `fire`."""
        return self._event

    def fire(self) -> None:
        """Set the present event and start a new one."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def debounced(self, debounce_s: float) -> AsyncIterator[None]:
        """Yield now and after changes; those within `debounce_s` of each other yield once."""
        while True:
            event = self._event
            yield
            await asyncio.sleep(debounce_s)
            await event.wait()
