"""Long output in a pager."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console


def pager(console: Console) -> AbstractContextManager[Any]:
    """A pager that shows colours, if this is a terminal; it ends at once if one screen is enough.

    `PAGER` names the program, and `LESS` its options if that is less.
    """
    if not console.is_terminal:
        return nullcontext()
    os.environ.setdefault("LESS", "-FRX")
    return console.pager(styles=True)
