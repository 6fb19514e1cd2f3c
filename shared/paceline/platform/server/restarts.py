"""Exponential backoff between restarts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RestartBackoff:
    """When a failed process may restart: the delay doubles, and resets after a stable run."""

    base_s: float = 0.25
    max_s: float = 15.0
    stable_s: float = 10.0
    failures: int = 0
    due_s: float = 0.0

    def failed(self, now_s: float, *, lived_s: float) -> None:
        """Record that the process ended at `now_s` after being healthy for `lived_s`."""
        if lived_s >= self.stable_s:
            self.failures = 0
        pause_s = self.base_s * 2.0 ** min(self.failures, 30)
        self.due_s = now_s + min(self.max_s, pause_s)
        self.failures += 1
