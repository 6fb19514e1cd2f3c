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
    (found,) = _warm_processes()
    return found


def sealed_processes() -> list[psutil.Process]:
    """What the sandboxes of this process have started; it may have other children, as a store."""
    return [child for each in _warm_processes() for child in each.children(recursive=True)]


def _warm_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if any("zygote" in a for a in each.cmdline())]
