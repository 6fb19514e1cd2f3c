"""The sandbox as the judge of one item sees it: bounded, and in turn with programs of others."""

from __future__ import annotations

from dataclasses import replace

from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.plugins import ProgramEnding, ProgramLimits, ProgramOutcome, Programs


class FairPrograms:
    """Runs the programs of one item: as many at a time as its owner's fair share of slots.

    Together they may run for `budget_s`; waiting for a slot does not count. A program that is left
    without time has timed out.
    """

    def __init__(
        self, sandbox: Programs, queue: FairQueue, owner: QueueOwner, budget_s: float
    ) -> None:
        self._sandbox = sandbox
        self._queue = queue
        self._owner = owner
        self._left_s = budget_s

    async def run(self, source: str, *, stdin: bytes, limits: ProgramLimits) -> ProgramOutcome:
        """As `Programs.run`."""
        async with self._queue.slot(self._owner):
            if self._left_s <= 0:
                return ProgramOutcome(ProgramEnding.TIMEOUT, 0, b"", b"", 0.0)
            bounded = replace(limits, time_s=min(limits.time_s, self._left_s))
            outcome = await self._sandbox.run(source, stdin=stdin, limits=bounded)
            self._left_s -= outcome.seconds
            return outcome
