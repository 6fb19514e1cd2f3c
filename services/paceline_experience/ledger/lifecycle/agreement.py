"""Which rollout workers the trainer agrees with, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.platform.telemetry.logs import Log
from paceline.types import WorkerMismatch
from paceline_experience.ledger.context import LedgerContext

MAX_NAMED = 3
"""Workers in a reason."""
log = Log("agreement")


class Agreement:
    """The newest comparison of each worker. In memory: the next steps bring others.

    A worker that is told of its fault starts again. Versions up to that moment were sampled by its
    former life, so they say nothing about it any more.
    """

    def __init__(self, core: LedgerContext) -> None:
        self._core = core
        self._since: dict[str, int | None] = {}  # worker -> version since which it disagrees
        self._faults: dict[str, str] = {}
        self._told: dict[str, int] = {}  # worker -> newest version when it was told of its fault

    def hear(self, mismatches: Sequence[WorkerMismatch]) -> None:
        """The workers whose tokens were compared in a step."""
        for each in mismatches:
            name, told = each.worker_id, self._told.get(each.worker_id, -1)
            if each.version <= told:
                continue
            self._core.meter.compared(name, each.kl)
            if each.since_version is None:
                self._since[name] = None
            elif self._since.get(name) is None:
                self._since[name] = each.version
                log.error("a worker and the trainer disagree", job=self._core.job_id, check=each)
            if each.at_fault and each.since_version is not None and each.since_version > told:
                self._faults[name] = _fault(each)

    def keep(self, workers: Iterable[str]) -> None:
        """Only these workers are there."""
        for name in self._since.keys() - set(workers):
            self._forget(name)

    def take_fault(self, worker: str) -> str:
        """What to tell a worker, once; empty: nothing."""
        fault = self._faults.get(worker, "")
        if fault:
            log.error("a worker is at fault", job=self._core.job_id, worker=worker, fault=fault)
            self._told[worker] = self._core.state.version
            self._forget(worker)
        return fault

    @property
    def words(self) -> str:
        """The workers that disagree, for people; empty: none does. The same while they do."""
        since = {name: version for name, version in self._since.items() if version is not None}
        if not since:
            return ""
        named = [f"{name} (since version {since[name]})" for name in sorted(since)[:MAX_NAMED]]
        more = [f"{len(since) - MAX_NAMED} more"] if len(since) > MAX_NAMED else []
        return (
            f"rollout: {', '.join(named + more)}: the trainer computes other log-probs from the "
            f"same weights; it agrees with {len(self._since) - len(since)} other workers"
        )

    def _forget(self, worker: str) -> None:
        self._since.pop(worker, None)
        self._faults.pop(worker, None)
        self._core.meter.gone(worker)


def _fault(each: WorkerMismatch) -> str:
    return (
        f"the trainer computes other log-probs from the same weights in versions "
        f"{each.since_version} to {each.version}, and agrees with other workers: mismatch_kl is "
        f"{each.kl:.3g}, allowed {each.allowed:.3g}"
    )
