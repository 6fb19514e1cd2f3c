"""What a job hears of an error that its code has raised."""

from __future__ import annotations

import os
import sys

MAX_ERROR_CHARS = 1000


def told(error: BaseException) -> str:
    """The error, and where in the job's own files it was raised."""
    where = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if os.path.dirname(name) == sys.path[0]:  # the job's own files
            where = f" ({os.path.basename(name)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] + where
