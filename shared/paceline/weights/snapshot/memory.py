"""A pool of shared memory, reused while its pages are warm."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import IntegrityError, StateError

_ADD_SEALS, _GET_SEALS = 1033, 1034  # of fcntl(2), as some builds of Python lack them
_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10
_SEALS = _SEAL | _SHRINK | _GROW | _FUTURE_WRITE
"""Nobody can resize the memory, nor write to it but by the mapping that there is."""


class _Buffer:
    """Mapped memory with its descriptors, which are open as long as it is mapped.

    Whoever has the memory also has the lease: an end of a pipe that only has to be open. Once all
    processes have closed it, in whatever way they end, the other end of the pipe shows that.
    """

    def __init__(
        self, mapping: mmap.mmap, fd: int, *, sealed: bool = False, lease: int = -1
    ) -> None:
        self.mapping = mapping
        self.fd = fd
        self.sealed = sealed
        self._lease = lease
        self._end_lease = self._closing(lease)
        self._watched = -1  # the other end, of what this process has lent itself
        self._end_watch = self._closing(-1)
        self._closing(fd)

    @property
    def lent(self) -> bool:
        """Whether this process has lent the memory to others, which may still use it."""
        return self._watched >= 0

    def lend(self) -> tuple[int, int]:
        """Descriptors of the memory and of its lease, for another process."""
        if self._lease < 0:
            self._watched, self._lease = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._end_lease = self._closing(self._lease)
            self._end_watch = self._closing(self._watched)
        return self.fd, self._lease

    def end_lease(self) -> None:
        """This process itself has no more use for the memory, and lends it to nobody."""
        self._end_lease()
        self._lease = -1

    def take_back(self) -> bool:
        """Whether nobody has the memory that was lent any more."""
        try:
            returned = not os.read(self._watched, 1)
        except BlockingIOError:
            return False
        if returned:
            self._end_watch()
            self._watched = -1
        return returned

    def _closing(self, fd: int) -> Callable[[], object]:
        """What closes a descriptor, once; the end of the mapping does it too."""
        if fd < 0:
            return lambda: None
        closing = weakref.finalize(self.mapping, os.close, fd)
        closing.atexit = False
        return closing


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes that another process on this machine can map.

    They return to the pool when the last memoryview of them is garbage-collected.
    """

    view: memoryview
    buffer: _Buffer

    @property
    def fd(self) -> int:
        """The descriptor; -1: not supported."""
        return self.buffer.fd

    def lend(self) -> tuple[int, int]:
        """Descriptors of the memory and of its lease, for another process, which will only read.

        The memory is not reused before all processes that have the lease have closed it.

        Raises:
            StateError: another process could write to it.
        """
        if not self.buffer.sealed:
            raise StateError("weights: this system cannot seal memory (memfd_create, Linux 5.1)")
        return self.buffer.lend()


class SharedMemoryPool:
    """Allocates memory and keeps returned buffers for the next snapshot of the same size.

    Each untouched page costs a page fault, which makes a first copy ten times slower, or twice as
    slow where the system grants huge pages. At most `limit` buffers, in use, lent or free, are
    kept; beyond that, returned ones are freed.
    """

    def __init__(self, *, limit: int = 2) -> None:
        self.limit = limit
        self._num_in_use = 0
        self._free: deque[_Buffer] = deque()
        self._lent: deque[_Buffer] = deque()  # to processes that may still have them

    def take(self, num_bytes: int) -> SharedMemory:
        """Memory of that size, with arbitrary content. Raises `StateError` when out of memory."""
        buffer = self._reuse(num_bytes) or _allocate(num_bytes)
        # All views refer to this object, so it is finalized when the last of them is gone.
        array = (ctypes.c_char * len(buffer.mapping)).from_buffer(buffer.mapping)
        self._num_in_use += 1
        weakref.finalize(array, self._return, buffer).atexit = False
        return SharedMemory(memoryview(array).cast("B")[:num_bytes], buffer)

    def _reuse(self, num_bytes: int) -> _Buffer | None:
        for _ in range(len(self._lent)):
            buffer = self._lent.popleft()
            (self._free if buffer.take_back() else self._lent).append(buffer)
        while True:
            try:
                buffer = self._free.pop()
            except IndexError:
                return None
            if len(buffer.mapping) == max(num_bytes, 1):
                return buffer

    def _return(self, buffer: _Buffer) -> None:
        # May run at any point, even inside `take`, so it must not take a lock.
        self._num_in_use -= 1
        buffer.end_lease()
        if self._num_in_use + len(self._free) + len(self._lent) < self.limit:
            (self._lent if buffer.lent else self._free).append(buffer)


def lack_of_sealed_memory() -> str:
    """Why this system has no memory that can be lent to other processes; empty: it has."""
    if sys.platform != "linux":
        return f"{sys.platform} has no memory that can be sealed"
    try:
        buffer = _allocate(1)
    except StateError as error:
        return str(error)
    return "" if buffer.sealed else "the kernel cannot seal memory; Linux 5.1 or newer can"


def borrowed(fd: int, lease: int, num_bytes: int) -> SharedMemory:
    """Map memory that another process has lent, and take over both descriptors.

    What this process writes there stays private to it. Raises `IntegrityError` if the memory is
    smaller than `num_bytes`, or could be written to or resized while it is read, and `StateError`
    when out of memory.
    """
    try:
        size = os.fstat(fd).st_size
        sealed = fcntl.fcntl(fd, _GET_SEALS)
        kept = _SHRINK | _GROW | _SEAL
        if size < num_bytes or sealed & kept != kept or not sealed & (_WRITE | _FUTURE_WRITE):
            raise IntegrityError(
                f"weights: {size} bytes of memory with seals {sealed:#x} were lent for a snapshot "
                f"of {num_bytes} bytes"
            )
        # Not read-only for Python, as torch would warn of each tensor.
        shared = mmap.mmap(fd, max(size, 1), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException as error:
        os.close(fd)
        os.close(lease)
        if isinstance(error, OSError):
            raise StateError(f"weights: lent memory cannot be mapped: {error}") from None
        raise
    buffer = _Buffer(shared, fd, sealed=True, lease=lease)
    return SharedMemory(memoryview(shared)[:num_bytes], buffer)


def _allocate(num_bytes: int) -> _Buffer:
    size = max(num_bytes, 1)
    try:
        if not hasattr(os, "memfd_create"):
            return _Buffer(mmap.mmap(-1, size), -1)
        fd = os.memfd_create("paceline-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o400)  # for whoever opens it by a name in /proc
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
    return _Buffer(mapping, fd, sealed=_seal(fd))


def _seal(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except OSError:  # an older kernel
        return False
    return True
