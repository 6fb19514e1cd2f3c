"""Runs pip within limits, and no longer than its parent.

Started as `python -I pip_child.py PARENT MEMORY_BYTES FILE_BYTES CPU_S ARGUMENTS...`; imports
nothing of Paceline.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(
    parent: int, memory_bytes: int, file_bytes: int, cpu_s: int, *, arguments: list[str]
) -> None:
    """Run `pip ARGUMENTS`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was killed while this interpreter started
        os._exit(1)
    for name, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))
    sys.argv = ["pip", *arguments]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), arguments=sys.argv[5:])
