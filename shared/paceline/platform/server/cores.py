"""How many threads a process that computes on a CPU should have."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
WIDE = 384
"""Hidden size from which more than one thread pays; below it the threads mostly wait for each
other. Measured with 128 (no gain) and 576 (1.8 times as fast with two threads)."""


def available_cores(*, limit: Path = CPU_MAX, affinity: int | None = None) -> int:
    """Cores that this process may use: its affinity, and the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    try:
        quota, period = limit.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def threads_for(
    wanted: int | Literal["auto"], *, hidden: int, processes: int = 1, cores: int | None = None
) -> int:
    """Threads for a process that computes with a model of this hidden size.

    `auto` is one for a small model, else a fair share of the cores between the `processes` of the
    same kind on this machine. Processes of other kinds share the cores too, in time: a thread
    without work sleeps (`OMP_WAIT_POLICY=passive`), so that whoever is busy has them.
    """
    if wanted != "auto":
        return wanted
    if hidden < WIDE:
        return 1
    return max(1, (available_cores() if cores is None else cores) // processes)
