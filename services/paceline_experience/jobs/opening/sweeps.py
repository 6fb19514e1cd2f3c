"""Sweeps the ledgers of a process over and over; a slow one keeps no other waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from paceline_experience.jobs.ledgers import Ledgers, OpenLedger

_SLOW_S = 0.2  # after which the next job is not kept waiting


async def sweep_all(
    ledgers: Ledgers,
    sweep: Callable[[OpenLedger], Coroutine[Any, Any, None]],
    tasks: asyncio.TaskGroup,
    *,
    every_s: float,
) -> None:
    """Sweep one job after the other, until cancelled; a slow one continues in the background."""
    slow: set[str] = set()
    while True:
        for job_id, entry in list(ledgers.active.items()):
            if job_id in slow:
                continue
            task = tasks.create_task(sweep(entry), name="sweep job")
            done, _ = await asyncio.wait({task}, timeout=_SLOW_S)
            if not done:
                slow.add(job_id)
                task.add_done_callback(lambda _, job_id=job_id: slow.discard(job_id))
        await asyncio.sleep(every_s)
