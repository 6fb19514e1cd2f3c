"""The pause of a job all of whose attempts at episodes fail, like `CrashLoopBackOff` of pods."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.telemetry.logs import Log
from paceline_experience.ledger.generation.submission import FAILURES, Report, Verdict

FREE_FAILURES = 32  # one after another, before the first pause
FIRST_S, LONGEST_S = 1.0, 30.0
log = Log("back_off")


class BackOff:
    """When attempts may begin: after failures only, the pauses double until one succeeds.

    A restart of the service forgets it.
    """

    def __init__(self, job_id: str, now: Callable[[], float]) -> None:
        self._job_id, self._now = job_id, now
        self._failures, self._next_s, self._until = 0, FIRST_S, 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the next attempts may begin; 0: they may."""
        return max(0.0, self._until - self._now()) if self._until else 0.0

    def note(self, reports: Sequence[Report]) -> bool:
        """Attempts have ended; returns whether that has ended a pause.

        Those that had begun before a pause do not make it longer.
        """
        if any(each.verdict is Verdict.OK for each in reports):
            was_left, self._until = self.left_s > 0, 0.0
            self._failures, self._next_s = 0, FIRST_S
            return was_left
        failed = [each for each in reports if each.verdict in FAILURES]
        self._failures += len(failed)
        if failed and self._failures >= FREE_FAILURES and not self.left_s:
            self._begin(failed[-1].detail)
        return False

    def _begin(self, reason: str) -> None:
        self._until = self._now() + self._next_s
        log.warning(
            "every attempt fails: the next ones wait",
            job=self._job_id,
            failures=self._failures,
            pause_s=self._next_s,
            reason=reason,
        )
        self._next_s = min(LONGEST_S, 2 * self._next_s)
