"""How long workloads have waited for what the cluster does not have. Pure, with a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TOLD_AFTER_S = 3.0


@dataclass(slots=True)
class _Wait:
    since_s: float
    reason: str
    reason_since_s: float
    reported: bool = False


class ReadinessDeadline:
    """Remembers since when each workload waits, over all its lives, until it is ready."""

    def __init__(self, most_s: float, *, clock: Callable[[], float]) -> None:
        self._most_s = most_s
        self._clock = clock
        self._waits: dict[str, _Wait] = {}

    def waits(self, name: str, reason: str) -> None:
        """Note what it waits for now; empty: that is not known."""
        now_s = self._clock()
        known = self._waits.get(name)
        if known is None and reason:
            self._waits[name] = _Wait(now_s, reason, now_s)
        elif known is not None and known.reason != reason:
            known.reason, known.reason_since_s, known.reported = reason, now_s, False

    def news(self, name: str) -> str:
        """The reason, once, when it has held for a while; else empty."""
        known = self._waits.get(name)
        if known is None or known.reported or self._clock() - known.reason_since_s < TOLD_AFTER_S:
            return ""
        known.reported = True
        return known.reason

    def over(self, name: str) -> bool:
        """Whether it still waits, and has for too long."""
        known = self._waits.get(name)
        if known is None or not known.reason:
            return False
        return self._clock() - known.since_s > self._most_s

    def forget(self, name: str) -> None:
        """Forget a workload that is ready, or not wanted any more."""
        self._waits.pop(name, None)
