"""Failed incarnations of a trainer, stored with the job so that they survive every restart."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_REASON_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Failures:
    """Consecutive failures: those since the job last got further than before."""

    count: int = 0
    incarnation: int = 0  # the newest one that failed
    best_step: int = -1  # the furthest step at which one failed
    reason: str = ""

    def record(self, incarnation: int, *, newest: int, step: int, reason: str) -> Failures:
        """With one more report of a failure, while the job is at `step`.

        Several reports of one incarnation count once and keep the first reason: the failures of
        other ranks are consequences of it. Reports of older incarnations are ignored.
        """
        reason = reason[:MAX_REASON_CHARS]
        if incarnation != newest or incarnation < 1:
            return self
        if incarnation == self.incarnation:
            return replace(self, reason=self.reason or reason)
        count = 1 if step > self.best_step else self.count + 1
        return Failures(count, incarnation, max(step, self.best_step), reason)
