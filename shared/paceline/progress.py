"""What a process should be getting on with, and since when it has not."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.config.service import ProbeSettings
from paceline.logs import Log


@dataclass(frozen=True, slots=True)
class Pulse:
    """A kind of work at one moment."""

    pending: float
    """How much of it is this process's own to do now. 0 while it has none, or while all of it
    waits for somebody else: what only waits is never unhealthy."""
    done: Any
    """Compared with the last one: another value means that something came of it."""


Read = Callable[[], Pulse]
Seconds = Callable[[], float]
# Time in which this process did not run itself (frozen, suspended) is nobody's fault.
MOST_PASSED_S = 5.0
SAY_EVERY_S = 60.0
_UNSEEN = object()
log = Log("progress")


@dataclass(slots=True)
class Work:
    """One kind of work; `silent_s` counts while some is pending and nothing comes of it."""

    name: str
    read: Read
    settings: ProbeSettings
    fatal: bool
    uneven: bool
    least_s: Seconds
    within_s: float | None
    pending: float = 0.0
    silent_s: float = 0.0
    done: Any = _UNSEEN
    came: float | None = None  # the last result
    longest_s: float | None = None  # that a result has taken

    def look(self, now: float, passed_s: float) -> None:
        """Take note of how things stand, so long after the last time."""
        pulse = self.read()
        under_way_s = self.silent_s + passed_s if self.pending > 0 else 0.0
        if self.done is not _UNSEEN and pulse.done != self.done:
            if under_way_s > 0:
                self.longest_s = max(self.longest_s or 0.0, under_way_s)
            self.came = now
            under_way_s = 0.0
        self.done, self.pending = pulse.done, pulse.pending
        self.silent_s = under_way_s if pulse.pending > 0 else 0.0

    def limit_s(self, base_s: float) -> float:
        """How long that may be."""
        base_s = self.within_s or base_s
        if not self.uneven:
            return max(base_s, 2.0 * self.least_s())
        if self.longest_s is None:
            return max(base_s, self.settings.first_s)
        return max(base_s, self.settings.slack * self.longest_s)

    def why(self, base_s: float) -> str:
        """What is wrong by this limit; empty: nothing."""
        limit_s = self.limit_s(base_s)
        if self.silent_s <= limit_s:
            return ""
        return (
            f"{self.name}: {self.pending:g} pending and nothing done for {self.silent_s:.0f} s; "
            f"at most {limit_s:g} s"
        )


@dataclass(slots=True)
class Progress:
    """All work of a process. Written by the event loop, read by any thread."""

    settings: ProbeSettings = field(default_factory=ProbeSettings)
    clock: Callable[[], float] = time.monotonic
    _looked: float | None = None
    _work: dict[str, Work] = field(default_factory=dict[str, Work])
    _tell: list[Callable[[], Mapping[str, Any]]] = field(
        default_factory=list[Callable[[], Mapping[str, Any]]]
    )
    _told: dict[str, Any] = field(default_factory=dict[str, Any])
    _said: dict[str, float] = field(default_factory=dict[str, float])

    def watch(
        self,
        name: str,
        read: Read,
        *,
        fatal: bool = True,
        uneven: bool = False,
        least_s: Seconds = lambda: 0.0,
        within_s: float | None = None,
    ) -> None:
        """Look at this work from now on.

        Without progress for `silent_s` the process is not ready, for `dead_s` not alive, unless it
        is not `fatal`: then a restart would not help. `least_s` is a deadline that the work has
        itself, which may be longer. `uneven` work takes as long as it takes the first time, and
        later `slack` times as long as the longest so far. `within_s` stands in for `silent_s`.
        """
        self._work[name] = Work(name, read, self.settings, fatal, uneven, least_s, within_s)

    def tell(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """What `/statusz` shows beside; no secrets, and JSON can hold it."""
        self._tell.append(facts)

    def look(self) -> None:
        """Take note of how everything stands; call it every second or so."""
        now = self.clock()
        passed_s = 0.0 if self._looked is None else min(now - self._looked, MOST_PASSED_S)
        self._looked = now
        for name, work in self._work.items():
            with self._supervised(name):
                work.look(now, passed_s)
        told: dict[str, Any] = {}
        for facts in self._tell:
            with self._supervised("facts"):
                told |= facts()
        self._told = told

    def why_unready(self) -> str:
        """Why the process should get nothing new to do; empty while it should."""
        return self._why(self.settings.silent_s, list(self._work.values()))

    def why_dead(self) -> str:
        """Why the process should be restarted; empty while it should not."""
        fatal = [work for work in list(self._work.values()) if work.fatal]
        return self._why(self.settings.dead_s, fatal)

    def status(self) -> dict[str, Any]:
        """For people and scripts: seconds, `null` for what has not been yet."""
        now, base_s = self.clock(), self.settings.silent_s
        work = {
            each.name: {
                "pending": each.pending,
                "silent_s": round(each.silent_s, 1),
                "limit_s": each.limit_s(base_s),
                "last_s": None if each.came is None else round(now - each.came, 1),
            }
            for each in list(self._work.values())
        }
        return {**self._told, "work": work}

    @contextmanager
    def _supervised(self, name: str) -> Generator[None]:
        """What cannot be read at the moment says nothing about the rest."""
        try:
            yield
        except Exception:  # the supervisor boundary of each kind of work
            now = self.clock()
            if now - self._said.get(name, float("-inf")) >= SAY_EVERY_S:
                self._said[name] = now
                log.exception("progress cannot be read", work=name)

    def _why(self, base_s: float, watched: list[Work]) -> str:
        return "; ".join(why for work in watched if (why := work.why(base_s)))
