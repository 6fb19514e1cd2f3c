"""The phase that a worker is in, for its heartbeats."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from paceline.enums import Phase
from paceline.types import WorkerPhase

LATELY = 8
"""Phases of a kind whose longest is reported: the first step compiles, unlike others."""


class PhaseReport:
    """Written by the thread that works, read by the event loop: each value is replaced whole.

    Most phases are shorter than the time between two heartbeats, so how long they take is measured
    here.
    """

    def __init__(self, phase: Phase, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = WorkerPhase(phase)
        self.marks = 0
        """Places of the phase that were passed: finer than what is done."""
        self._clock = clock
        self._since_s = clock()
        self._lately_s: dict[str, deque[float]] = {}

    def enter(self, phase: Phase, *, number: int = -1, total: float = 0.0) -> None:
        """A phase begins; `number` is that of the version or step that it is for."""
        now_s = self._clock()
        ended_s = self._lately_s.setdefault(self.now.name, deque(maxlen=LATELY))
        ended_s.append(now_s - self._since_s)
        longest_s = max(self._lately_s.get(phase, ()), default=0.0)
        self._since_s, self.marks = now_s, 0
        self.now = WorkerPhase(phase, number, total=total, longest_s=longest_s)

    def reached(self, done: float, total: float = 0.0) -> None:
        """The phase has come so far; a `total` of 0 leaves the one before."""
        self.now = replace(self.now, done=done, total=total or self.now.total)

    def mark(self) -> None:
        """One more place of the phase is passed."""
        self.marks += 1

    def add(self, done: float = 1.0) -> None:
        """So much more of the phase is done."""
        self.reached(self.now.done + done)
