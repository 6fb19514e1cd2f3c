"""Memory that the C library has for itself although nothing is in it.

Activations and copies of weights come and go by the hundred megabytes. What is freed stays with the
process, in an arena for each thread that has ever allocated: between one step and the next that is
more than the model itself.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_LEAST = 128 << 20
"""Free bytes below which pages are kept: to get them again costs a small model more than they are
worth."""
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (*_FIELDS, "fordblks", "keepcost")]


def share_one_arena() -> None:
    """Let threads that are started from now on reuse what others have freed."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def return_free_memory(*, least: int = _LEAST) -> bool:
    """Return free pages to the system, in any thread; whether there were that many bytes free."""
    library = _library()
    if library is None or library.mallinfo2().fordblks < least:
        return False
    library.malloc_trim(0)
    return True


@cache
def _library() -> Any:
    """Glibc 2.33 or newer; None: this is another C library."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Info
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        return library
    return None
