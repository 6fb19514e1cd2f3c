"""How long a trainer spends in each phase of its work."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class PhaseClock:
    """Seconds by phase since the start, and the current phase."""

    phase: str = "loading"
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    ended: dict[str, int] = field(default_factory=dict[str, int])  # how often each phase has ended
    _started: float | None = None  # of the current phase

    @contextmanager
    def measure(self, phase: str) -> Generator[None]:
        """Count the time inside the context as that of a phase."""
        before, self.phase = self.phase, phase
        self._started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = self.elapsed()
            self.ended[phase] = self.ended.get(phase, 0) + 1
            self.phase, self._started = before, None

    def elapsed(self) -> dict[str, float]:
        """Seconds by phase, including the current one so far."""
        if self._started is None:
            return dict(self.seconds)
        elapsed_s = time.perf_counter() - self._started
        return {**self.seconds, self.phase: self.seconds.get(self.phase, 0.0) + elapsed_s}
