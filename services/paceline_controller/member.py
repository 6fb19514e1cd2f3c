"""The controller's entry in the roster, the same for all runtimes."""

from __future__ import annotations

import time

from paceline.enums import WorkerKind
from paceline.platform.server.chassis import Chassis
from paceline.types import Worker


def worker_of(chassis: Chassis) -> Worker:
    """The controller, as reported with every heartbeat."""
    settings = chassis.settings
    return Worker(
        worker_id=settings.worker_id,
        kind=WorkerKind.CONTROLLER,
        endpoint=chassis.address,
        site=settings.site,
        load={"cpu_s": time.process_time()},
    )
