"""The pause of a job all of whose attempts at episodes fail, like `CrashLoopBackOff` of pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.enums import EpisodeOutcome
from paceline.platform.server.restarts import RestartBackoff
from paceline.platform.telemetry.logs import Log
from paceline_experience.ledger.generation.submission import Report, Verdict
from paceline_experience.ledger.state import GroupRecord

FREE_FAILURES = 32  # one after another, before the first pause; more if more are under way
LONGEST_S = 30.0
Attempt = tuple[str, int, int]  # group, index, number
log = Log("back_off")


def of_training(
    before: Mapping[str, GroupRecord | None],
    reports: Sequence[Report],
    outcomes: Sequence[EpisodeOutcome],
) -> list[Report]:
    """Reports on attempts at training episodes that were under way.

    Evaluations do not wait: their episodes are few, and are not tried for ever.

    Args:
        before: groups as they were, by id.
        reports: in any order.
        outcomes: of each.
    """
    late = (EpisodeOutcome.SUPERSEDED, EpisodeOutcome.DUPLICATE)
    return [
        report
        for report, outcome in zip(reports, outcomes, strict=True)
        if outcome not in late and (group := before[report.group_id]) and not group.is_eval
    ]


class BackOff:
    """When training episodes may begin: after failures only, pauses double until one succeeds.

    Episodes that are lost with their worker say nothing about the job, and those that cannot be
    repeated are dropped anyway: neither counts. A restart of the service forgets all.
    """

    def __init__(
        self, job_id: str, now: Callable[[], float], num_leased: Callable[[], int]
    ) -> None:
        self._job_id, self._now, self._num_leased = job_id, now, num_leased
        self._reset()

    def _reset(self) -> None:
        self._failures = 0  # one after another
        self._pauses = RestartBackoff(base_s=1.0, max_s=LONGEST_S)
        self._newest = set[Attempt]()  # begun since the last pause, once there was one

    @property
    def left_s(self) -> float:
        """Seconds until the next attempts may begin; 0: they may."""
        return max(0.0, self._pauses.due_s - self._now()) if self._pauses.failures else 0.0

    def begun(self, attempts: Iterable[Attempt]) -> None:
        """These were leased."""
        if self._pauses.failures:
            self._newest.update(attempts)

    def note(self, reports: Sequence[Report]) -> bool:
        """Training attempts have ended; returns whether that has ended a pause.

        Those that had begun before a pause do not lead to the next one.
        """
        if any(each.verdict is Verdict.OK for each in reports):
            was_left = self.left_s > 0
            self._reset()
            return was_left
        failed = [each for each in reports if self._counts(each)]
        self._failures += len(failed)
        limit = max(FREE_FAILURES, self._num_leased())
        enough = self._pauses.failures or self._failures >= limit
        if failed and enough and not self.left_s:
            self._begin(failed[-1].detail)
        return False

    def _counts(self, report: Report) -> bool:
        if report.verdict is not Verdict.REQUEUE or report.is_lost:
            return False
        return not self._pauses.failures or report.attempt_key in self._newest

    def _begin(self, reason: str) -> None:
        self._pauses.failed(self._now(), lived_s=0.0)
        self._newest.clear()
        log.warning(
            "every attempt fails: the next ones wait",
            job=self._job_id,
            failures=self._failures,
            pause_s=round(self.left_s, 1),
            reason=reason,
        )
