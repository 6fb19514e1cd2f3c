"""Compiles regular expressions where one may take its time and its memory.

It imports nothing but the standard library, and starts without installed packages.
"""

from __future__ import annotations

import os
import re
import resource

from paceline.isolation.child import ServedCall, serve

_MEMORY_BYTES = 1 << 28
_CPU_S = 2


def main() -> None:
    """Serve `compile`."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    serve({"compile": _compile})


def _compile(call: ServedCall) -> dict[str, list[str]]:
    return {"problems": [_problem(pattern) for pattern in call.fields["patterns"]]}


def _problem(pattern: str) -> str:
    """What is wrong with a pattern; empty: nothing."""
    try:
        re.compile(pattern)
    except RecursionError:
        return "maximum recursion depth exceeded"  # Python's own text depends on the depth
    except (re.error, OverflowError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""
