"""The controller as the roster is to see it, wherever it runs its workloads."""

from __future__ import annotations

import time

from paceline.chassis import Chassis
from paceline.types import Worker, WorkerKind


def worker_of(chassis: Chassis) -> Worker:
    """What is reported with every beat."""
    settings = chassis.settings
    return Worker(
        worker_id=settings.worker_id,
        kind=WorkerKind.CONTROLLER,
        endpoint=chassis.address,
        site=settings.site,
        load={"cpu_s": time.process_time()},
    )
