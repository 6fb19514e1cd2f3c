"""The child's side of a process that exchanges lines with its parent over pipes."""

from __future__ import annotations

import os
import threading
import time
from typing import TextIO

PARENT_CHECK_S = 2.0


def take_pipes() -> tuple[TextIO, TextIO]:
    """Take over stdin and stdout, so that libraries that print or prompt cannot use them."""
    source, sink = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    os.dup2(2, 1)
    return source, sink


def end_with_parent() -> None:
    """Exit when the parent does, even if the main thread hangs and misses the closed pipe."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
