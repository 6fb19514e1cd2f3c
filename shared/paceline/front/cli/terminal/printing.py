"""Prints texts that others have written: names, notes, reasons, errors, logs."""

from __future__ import annotations

import sys

from paceline.platform.text import visible


def say(text: object, *, error: bool = False, end: str = "\n") -> None:
    """Print a text, without what could act on the terminal; `error`: on standard error."""
    stream = sys.stderr if error else sys.stdout
    print(visible(str(text)), file=stream, end=end, flush=True)
