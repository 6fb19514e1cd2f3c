"""A child process that does not outlive its parent."""

from __future__ import annotations

import os
import threading
import time

PARENT_CHECK_S = 2.0


def end_with_parent() -> None:
    """Exit when the parent does, even if the main thread hangs and misses the closed pipe."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
