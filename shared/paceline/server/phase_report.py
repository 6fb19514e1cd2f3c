"""The phase that a worker is in, for its heartbeats."""

from __future__ import annotations

from dataclasses import replace

from paceline.enums import Phase
from paceline.types import WorkerPhase


class PhaseReport:
    """Written by the thread that works, read by the event loop: each value is replaced whole."""

    def __init__(self, phase: Phase) -> None:
        self.now = WorkerPhase(phase)

    def enter(self, phase: Phase, *, number: int = -1, total: float = 0.0) -> None:
        """A phase begins; `number` is that of the version or step that it is for."""
        self.now = WorkerPhase(phase, number, total=total)

    def reached(self, done: float, total: float = 0.0) -> None:
        """The phase has come so far; a `total` of 0 leaves the one before."""
        self.now = replace(self.now, done=done, total=total or self.now.total)

    def add(self, done: float = 1.0) -> None:
        """So much more of the phase is done."""
        self.reached(self.now.done + done)
