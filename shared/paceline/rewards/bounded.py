"""Bounds of CPU time and memory for what a response makes a reward compute."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import PacelineError

T = TypeVar("T")
MEMORY_BYTES = 1 << 30
# Python code that swallows the exception meets it again after so many seconds of CPU time.
_AGAIN_S = 0.05
# Code that never comes back to Python is ended, with its process, so much later.
_HARD_S = 1.0


class ExceededError(PacelineError):
    """The computation took more than it may."""


class _ExpiredError(BaseException):
    """Not an `Exception`, as libraries for symbolic mathematics catch those."""


def bounded(function: Callable[[], T], *, cpu_s: float, memory_bytes: int = MEMORY_BYTES) -> T:
    """The result of a computation in this thread, which must be the main one.

    Its time is CPU time of the process: on a busy machine it may take longer, but a response that
    is within its bounds stays so. Code that does not come back to Python in time ends the process
    by SIGPROF, which the scorer reports as a timeout too.

    Args:
        function: may be interrupted anywhere.
        cpu_s: seconds of CPU time.
        memory_bytes: address space beyond what the process has.

    Raises:
        ExceededError: it takes more time or memory.
    """
    import resource  # not on every system that reads the options of rewards

    before = signal.signal(signal.SIGVTALRM, _expire)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, _AGAIN_S)
            signal.setitimer(signal.ITIMER_PROF, 2 * cpu_s + _HARD_S)
            _limit_memory(memory_bytes, limits)
            return function()
        finally:
            _free(limits)
    except _ExpiredError:
        _free(limits)  # the first time it may have been interrupted
        raise ExceededError(f"more than {cpu_s:g} s of CPU time") from None
    except (MemoryError, RecursionError) as error:
        raise ExceededError(f"too large: {type(error).__name__}") from None
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _expire(number: int, frame: Any) -> None:
    del number, frame
    raise _ExpiredError


def _free(limits: tuple[int, int]) -> None:
    import resource

    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    resource.setrlimit(resource.RLIMIT_AS, limits)


def _limit_memory(memory_bytes: int, limits: tuple[int, int]) -> None:
    import resource

    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux
        return
    pages = int(statm.read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    present = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([most, *present]), limits[1]))
