"""Tracks the progress of a process on its pending work, which decides liveness and readiness."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.config.service import ProbeSettings
from paceline.platform.telemetry.logs import Log


@dataclass(frozen=True, slots=True)
class WorkProgress:
    """A snapshot of one kind of work."""

    pending: float
    """How much work this process could do now. 0 if there is none, or if all of it waits for
    another service: waiting is never unhealthy."""
    done: Any
    """Any change since the last value means progress."""


Read = Callable[[], WorkProgress]
Seconds = Callable[[], float]
# Caps the time between two checks, so that time in which this process was suspended does not count.
MAX_PASSED_S = 5.0
LOG_INTERVAL_S = 60.0
_UNSEEN = object()
log = Log("progress")


@dataclass(slots=True)
class Work:
    """One kind of work; `silent_s` is how long some has been pending without progress."""

    name: str
    read: Read
    settings: ProbeSettings
    fatal: bool
    uneven: bool
    min_limit_s: Seconds
    within_s: float | None
    pending: float = 0.0
    silent_s: float = 0.0
    done: Any = _UNSEEN
    progress_at_s: float | None = None  # time of the last progress
    longest_s: float | None = None  # longest time between two results so far

    def check(self, now: float, passed_s: float) -> None:
        """Record the current state, `passed_s` after the last check."""
        current = self.read()
        under_way_s = self.silent_s + passed_s if self.pending > 0 else 0.0
        if self.done is not _UNSEEN and current.done != self.done:
            if under_way_s > 0:
                self.longest_s = max(self.longest_s or 0.0, under_way_s)
            self.progress_at_s = now
            under_way_s = 0.0
        self.done, self.pending = current.done, current.pending
        self.silent_s = under_way_s if current.pending > 0 else 0.0

    def limit_s(self, base_s: float) -> float:
        """How long the work may go without progress."""
        base_s = self.within_s or base_s
        if not self.uneven:
            return max(base_s, 2.0 * self.min_limit_s())
        if self.longest_s is None:
            return max(base_s, self.settings.first_s)
        return max(base_s, self.settings.slack * self.longest_s)

    def why(self, base_s: float) -> str:
        """The reason the work counts as stuck; empty if it does not."""
        limit_s = self.limit_s(base_s)
        if self.silent_s <= limit_s:
            return ""
        return (
            f"{self.name}: {self.pending:g} pending, no progress for {self.silent_s:.0f} s; "
            f"limit {limit_s:g} s"
        )


@dataclass(slots=True)
class ProcessProgress:
    """All work of a process, written by the event loop and read by any thread."""

    settings: ProbeSettings = field(default_factory=ProbeSettings)
    clock: Callable[[], float] = time.monotonic
    _checked_s: float | None = None
    _work: dict[str, Work] = field(default_factory=dict[str, Work])
    _status_sources: list[Callable[[], Mapping[str, Any]]] = field(
        default_factory=list[Callable[[], Mapping[str, Any]]]
    )
    _extra_status: dict[str, Any] = field(default_factory=dict[str, Any])
    _logged_s: dict[str, float] = field(default_factory=dict[str, float])

    def watch(
        self,
        name: str,
        read: Read,
        *,
        fatal: bool = True,
        uneven: bool = False,
        min_limit_s: Seconds = lambda: 0.0,
        within_s: float | None = None,
    ) -> None:
        """Register a kind of work.

        Without progress the process becomes unready after `silent_s` and is restarted after
        `dead_s`, unless the work is not `fatal` because a restart would not help. `min_limit_s`
        returns the work's own deadline, which may be longer. `uneven` work is allowed `first_s`
        at first, then `slack` times its longest duration so far. `within_s` replaces `silent_s`.
        """
        self._work[name] = Work(name, read, self.settings, fatal, uneven, min_limit_s, within_s)

    def add_status(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Add JSON-compatible fields to `/statusz`; they must hold no secrets."""
        self._status_sources.append(facts)

    def check(self) -> None:
        """Record the state of all work; call it about every second."""
        now = self.clock()
        passed_s = 0.0 if self._checked_s is None else min(now - self._checked_s, MAX_PASSED_S)
        self._checked_s = now
        for name, work in self._work.items():
            with self._supervised(name):
                work.check(now, passed_s)
        status: dict[str, Any] = {}
        for facts in self._status_sources:
            with self._supervised("facts"):
                status |= facts()
        self._extra_status = status

    def why_unready(self) -> str:
        """The reason to send the process no new work; empty if there is none."""
        return self._why(self.settings.silent_s, list(self._work.values()))

    def why_dead(self) -> str:
        """The reason to restart the process; empty if there is none."""
        fatal = [work for work in list(self._work.values()) if work.fatal]
        return self._why(self.settings.dead_s, fatal)

    def status(self) -> dict[str, Any]:
        """The state for `/statusz`: durations in seconds, `null` before the first result."""
        now, base_s = self.clock(), self.settings.silent_s
        work = {
            item.name: {
                "pending": item.pending,
                "silent_s": round(item.silent_s, 1),
                "limit_s": item.limit_s(base_s),
                "last_s": None
                if item.progress_at_s is None
                else round(now - item.progress_at_s, 1),
            }
            for item in list(self._work.values())
        }
        return {**self._extra_status, "work": work}

    @contextmanager
    def _supervised(self, name: str) -> Generator[None]:
        """Log and ignore a source that cannot be read, so that the others still count."""
        try:
            yield
        except Exception:  # the supervisor boundary of each kind of work
            now = self.clock()
            if now - self._logged_s.get(name, float("-inf")) >= LOG_INTERVAL_S:
                self._logged_s[name] = now
                log.exception("progress cannot be read", work=name)

    def _why(self, base_s: float, watched: list[Work]) -> str:
        return "; ".join(why for work in watched if (why := work.why(base_s)))
