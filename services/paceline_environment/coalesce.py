"""Batches small items into few messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from paceline.platform.transport.linger import Linger

Item = TypeVar("Item")


class Coalescer(Generic[Item]):
    """Collects items for a while and passes them to `send` as lists of at most `max_items`."""

    def __init__(
        self,
        send: Callable[[list[Item]], Coroutine[Any, Any, None]],
        *,
        linger: Linger,
        max_items: int,
    ) -> None:
        """`linger`: how long the first item of a list waits for others, in seconds."""
        self._send = send
        self._linger = linger
        self._max_items = max_items
        self._items: list[Item] = []
        self._timer: asyncio.Handle | None = None
        self._soon = False
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, item: Item, *, soon: bool = False) -> None:
        """Queue an item; with `soon` no item waits any longer than for those that are put now."""
        self._items.append(item)
        if len(self._items) >= self._max_items:
            self._flush()
        elif soon and not self._soon:
            if self._timer is not None:
                self._timer.cancel()
            self._soon = True
            self._timer = asyncio.get_running_loop().call_soon(self._flush)
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._linger(), self._flush)

    def close(self) -> None:
        """Cancel all sends, pending and in flight."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._soon = False
        items, self._items = self._items, []
        if not items:
            return
        task = asyncio.create_task(self._send(items))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def portions(
    items: Sequence[Item], *, size: Callable[[Item], int], max_size: int
) -> list[list[Item]]:
    """Split the items, in order, into portions of at most `max_size`.

    An item that is larger gets a portion of its own.
    """
    batches: list[list[Item]] = []
    remaining = 0
    for item in items:
        needed = size(item)
        if not batches or needed > remaining:
            batches.append([])
            remaining = max_size
        batches[-1].append(item)
        remaining -= needed
    return batches
