"""Processes that start and end sooner than Python's own do, for programs that import much.

A trainer spends half of the processor time of its start in garbage collections that find nothing,
and in taking apart what was imported.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

_codes: list[int] = []


@contextmanager
def importing() -> Generator[None]:
    """Import what a process needs when it starts, without the garbage collector.

    It would walk all that stays again and again. Nor does it walk that afterwards.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def leave(code: int) -> NoReturn:
    """Exit as `sys.exit` does, but do not take apart what was imported.

    Threads are waited for, and what was registered for the end of the process is done.
    """
    _codes.append(code & 0xFF)
    sys.exit(code)


@contextmanager
def leaving() -> Generator[None]:
    """Run a whole program in this context, and `leave` with its exit code."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int | None):
            leave(end.code or 0)
        raise  # the interpreter has something to say about it
    leave(0)


def _leave() -> None:
    """The end of a process whose exit code is known."""
    if _codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_codes[-1])


# What is registered first is called last, so this module is imported before others.
atexit.register(_leave)
