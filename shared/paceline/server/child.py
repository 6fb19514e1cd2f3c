"""The child's side of a process that exchanges lines with its parent over pipes."""

from __future__ import annotations

import os
from typing import TextIO


def take_pipes() -> tuple[TextIO, TextIO]:
    """Take over stdin and stdout, so that libraries that print or prompt cannot use them."""
    source, sink = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    os.dup2(2, 1)
    return source, sink
