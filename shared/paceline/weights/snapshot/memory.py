"""A pool of shared memory, reused while its pages are warm."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass

from paceline.errors import StateError


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes that another process on this machine can map through `fd` (-1: not supported).

    They return to the pool when the last memoryview of them is garbage-collected.
    """

    view: memoryview
    fd: int


class SharedMemoryPool:
    """Allocates memory and keeps returned buffers for the next snapshot of the same size.

    Each untouched page costs a page fault, which makes a first copy ten times slower, or twice as
    slow where the system grants huge pages. At most `limit` buffers, in use or free, are kept;
    beyond that, returned ones are freed.
    """

    def __init__(self, *, limit: int = 2) -> None:
        self.limit = limit
        self._num_in_use = 0
        self._free: deque[tuple[mmap.mmap, int]] = deque()

    def take(self, num_bytes: int) -> SharedMemory:
        """Memory of that size, with arbitrary content. Raises `StateError` when out of memory."""
        mapping, fd = self._reuse(num_bytes) or _allocate(num_bytes)
        # All views refer to this object, so it is finalized when the last of them is gone.
        array = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        self._num_in_use += 1
        weakref.finalize(array, self._return, mapping, fd).atexit = False
        return SharedMemory(memoryview(array).cast("B")[:num_bytes], fd)

    def _reuse(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
        while True:
            try:
                mapping, fd = self._free.pop()
            except IndexError:
                return None
            if len(mapping) == max(num_bytes, 1):
                return mapping, fd

    def _return(self, mapping: mmap.mmap, fd: int) -> None:
        # May run at any point, even inside `take`, so it must not take a lock.
        self._num_in_use -= 1
        if self._num_in_use + len(self._free) < self.limit:
            self._free.append((mapping, fd))


def _allocate(num_bytes: int) -> tuple[mmap.mmap, int]:
    size = max(num_bytes, 1)
    try:
        if not hasattr(os, "memfd_create"):
            return mmap.mmap(-1, size), -1
        fd = os.memfd_create("paceline-weights")
        try:
            os.ftruncate(fd, size)
            mapping = mmap.mmap(fd, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    mapping.madvise(mmap.MADV_HUGEPAGE)
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise StateError(
            f"weights: no memory for a snapshot of {num_bytes} bytes: {error}"
        ) from None
    weakref.finalize(mapping, os.close, fd).atexit = False
    return mapping, fd
