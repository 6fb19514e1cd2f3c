"""Helpers for processes that tests kill."""

from __future__ import annotations

from contextlib import suppress

import psutil


def goes_on(process: psutil.Process) -> bool:
    """Whether a process is still running; a zombie is not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def warm_process() -> psutil.Process:
    """The warm process of the only sandbox of this process."""
    (found,) = [
        each for each in psutil.Process().children() if any("zygote" in a for a in each.cmdline())
    ]
    return found
