"""Processes that tests end."""

from __future__ import annotations

from contextlib import suppress

import psutil


def goes_on(process: psutil.Process) -> bool:
    """Whether it has not ended; its parent may take note of that at any moment."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
