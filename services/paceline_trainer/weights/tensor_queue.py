"""Tensors of a version on their way into the memory from which they are served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

from torch import Tensor

MOST_WAITING = 32 << 20
"""Bytes of tensors on a CPU, where a second copy of all weights would be in the same memory."""
_STAGING_S = 2.0  # without any tensor staged


class TensorQueue:
    """Tensors from the thread that gathers them for the thread that stages them."""

    def __init__(self, *, most_bytes: int | None = None) -> None:
        """`most_bytes`: of tensors that wait to be staged, or one that is larger; None: any."""
        self._queue = SimpleQueue[tuple[str, Tensor] | None]()
        self._most_bytes = most_bytes
        self._waiting = 0  # bytes
        self._room = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, name: str, tensor: Tensor) -> None:
        """Queue a tensor; waits for room as long as somebody stages tensors."""
        with self._room:
            if not self._room.wait_for(lambda: self._has_room(tensor.nbytes), _STAGING_S):
                self._most_bytes = None  # the ledger does not answer: training goes on
            self._waiting += tensor.nbytes
        if not self._closed:
            self._queue.put((name, tensor))

    def _has_room(self, num_bytes: int) -> bool:
        most = self._most_bytes
        return (
            self._closed or most is None or not self._waiting or self._waiting + num_bytes <= most
        )

    def end(self, error: BaseException | None = None) -> None:
        """End the iteration after what is queued, with an error if there is one."""
        self._error = error
        self._queue.put(None)

    def close(self) -> None:
        """Drop all further tensors; a thread that waits for one, or for room, stops waiting."""
        with self._room:
            self._closed = True
            self._room.notify()
        self._queue.put(None)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (item := self._queue.get()) is not None:
            num_bytes = item[1].nbytes
            yield item
            del item  # or it would stay until the next one has come
            with self._room:
                self._waiting -= num_bytes
                self._room.notify()
        if self._error is not None:
            raise self._error
