"""Helpers for processes that tests kill."""

from __future__ import annotations

from contextlib import suppress

import psutil


def goes_on(process: psutil.Process) -> bool:
    """Whether a process is still running; a zombie is not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
