"""Many small things sent as few messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Coalescer(Generic[Item]):
    """Collects what comes within `window_s` and hands it to `send` as lists of at most `most`."""

    def __init__(
        self,
        send: Callable[[list[Item]], Coroutine[Any, Any, None]],
        *,
        window_s: float,
        most: int,
    ) -> None:
        self._send = send
        self._window_s = window_s
        self._most = most
        self._items: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, item: Item) -> None:
        """Send it soon."""
        self._items.append(item)
        if len(self._items) >= self._most:
            self._flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._window_s, self._flush)

    def close(self) -> None:
        """Stop all sending."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._items = self._items, []
        if not items:
            return
        task = asyncio.create_task(self._send(items))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def portions(items: Sequence[Item], *, size: Callable[[Item], int], most: int) -> list[list[Item]]:
    """The items in order, cut so that no portion of several is larger than `most`."""
    found: list[list[Item]] = []
    room = 0
    for item in items:
        needed = size(item)
        if not found or needed > room:
            found.append([])
            room = most
        found[-1].append(item)
        room -= needed
    return found
