"""The sandbox as the judges of one job see it: programs of all jobs take turns."""

from __future__ import annotations

from paceline.plugins import ProgramLimits, ProgramOutcome, Programs
from paceline_reward.fair_queue import FairQueue, QueueOwner


class FairPrograms:
    """Runs programs of one owner, as many at a time as its fair share of slots."""

    def __init__(self, sandbox: Programs, queue: FairQueue, owner: QueueOwner) -> None:
        self._sandbox = sandbox
        self._queue = queue
        self._owner = owner

    async def run(self, source: str, *, stdin: bytes, limits: ProgramLimits) -> ProgramOutcome:
        """As `Programs.run`; the time in which it waits for a slot does not count."""
        async with self._queue.slot(self._owner):
            return await self._sandbox.run(source, stdin=stdin, limits=limits)
