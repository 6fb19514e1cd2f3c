"""Shared memory that is used again while its pages are warm."""

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
class Memory:
    """Bytes that another process of this machine can map through `fd` (-1: it cannot).

    They are given back when the last memoryview on them is gone, whoever holds it.
    """

    view: memoryview
    fd: int


class Pool:
    """Gives memory out, and keeps what came back for the next snapshot of that size.

    Untouched pages cost a page fault each, which is ten times slower than the copy into them; where
    the system gives huge pages to shared memory that asks for them, twice as slow. As long as
    `limit` pieces are out, what comes back is freed, so that no more than that stay.
    """

    def __init__(self, *, limit: int = 2) -> None:
        self._limit = limit
        self._num_out = 0
        self._free: deque[tuple[mmap.mmap, int]] = deque()

    def take(self, num_bytes: int) -> Memory:
        """Memory of that size, with any content. Raises `StateError` when the machine has none."""
        mapping, fd = self._reuse(num_bytes) or _allocate(num_bytes)
        # Views are taken of this object, so that its end says that there is none left.
        array = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        self._num_out += 1
        weakref.finalize(array, self._give_back, mapping, fd).atexit = False
        return Memory(memoryview(array).cast("B")[:num_bytes], fd)

    def _reuse(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
        while True:
            try:
                mapping, fd = self._free.pop()
            except IndexError:
                return None
            if len(mapping) == max(num_bytes, 1):
                return mapping, fd

    def _give_back(self, mapping: mmap.mmap, fd: int) -> None:
        # Runs wherever the last view died, also in the middle of `take`: so no lock.
        self._num_out -= 1
        if self._num_out + len(self._free) < self._limit:
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
