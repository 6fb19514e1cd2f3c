"""What a child process does that is spoken to through its pipes, in lines."""

from __future__ import annotations

import os
import threading
import time
from typing import TextIO

PARENT_CHECK_S = 2.0


def take_pipes() -> tuple[TextIO, TextIO]:
    """Keep the pipes for lines: libraries that print or ask must not touch them."""
    source, sink = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return source, sink


def end_with_parent() -> None:
    """End this process when its parent does: what hangs never sees the end of a pipe."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
