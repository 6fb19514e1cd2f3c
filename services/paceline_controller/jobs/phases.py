"""The phase of each worker of a job, and how long it has stood there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.enums import Phase
from paceline.types import Worker, WorkerPhase

LEAST_S = 30.0
SLACK = 10.0
"""Times as long as the longest that a phase has stood lately, it may stand."""
LATELY = 8
"""Number of steps that count: the first step compiles, and says nothing about the others."""
USUAL_LIMIT_S = 120.0
LIMITS_S = {
    # They compile at first, and what the last one does may be as long as all of a step.
    Phase.STEPPING: 1800.0,
    Phase.CHECKPOINTING: 1800.0,
    Phase.PUBLISHING: 1800.0,
    Phase.FINISHED: 1800.0,
}
"""How long a phase may stand that has not yet moved before in this process, and any at most."""
_IN_BYTES = frozenset(
    {
        Phase.DOWNLOADING_MODEL,
        Phase.LOADING_MODEL,
        Phase.RECEIVING_WEIGHTS,
    }
)
_NAMES = frozenset(Phase)
_PREFIXES = ("", "k", "M", "G", "T", "P")


class Standing(NamedTuple):
    """A phase in which a worker has stood."""

    worker_id: str
    phase: WorkerPhase
    since_s: float
    limit_s: float  # how long it may

    @property
    def words(self) -> str:
        """`rollout-0 is receiving weights of version 3, 3.1 of 14.2 GB`."""
        rank = f", {self.phase.rank}," if self.phase.rank else ""
        return f"{self.worker_id}{rank} is {words(self.phase)}"


@dataclass(slots=True)
class _Mark:
    """How far one process has come."""

    pid: int
    phase: WorkerPhase
    since_s: float
    best: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    lately_s: dict[str, deque[float]] = field(default_factory=dict[str, "deque[float]"])

    def take(self, phase: WorkerPhase, now_s: float) -> bool:
        """Whether it has come further than ever before: as far again, after a retry, is none."""
        if phase != self.phase:
            lately_s = self.lately_s.setdefault(self.phase.name, deque(maxlen=LATELY))
            lately_s.append(now_s - self.since_s)
            self.phase, self.since_s = phase, now_s
        reached = (phase.number, phase.done)
        if phase.name in self.best and reached <= self.best[phase.name]:
            return False
        self.best[phase.name] = reached
        return True

    @property
    def limit_s(self) -> float:
        """How long its phase may stand."""
        most_s = LIMITS_S.get(Phase(self.phase.name), USUAL_LIMIT_S)
        seen_s = self.lately_s.get(self.phase.name, ())
        longest_s = max([*seen_s, self.phase.longest_s])
        return min(most_s, max(LEAST_S, SLACK * longest_s)) if longest_s else most_s


class WorkerPhases:
    """Follows the phases of a job's own workers; others than those of `Phase` are unknown."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}

    def look(self, workers: Iterable[Worker], now_s: float) -> bool:
        """Take note of the workers that there are; returns whether any has got on."""
        phases = {w.worker_id: (w.pid, phase) for w in workers if (phase := _own(w)) is not None}
        moved = False
        for name, (pid, phase) in phases.items():
            mark = self._marks.get(name)
            if mark is None or mark.pid != pid:
                mark = self._marks[name] = _Mark(pid, phase, now_s)
            moved = mark.take(phase, now_s) or moved
        self._marks = {name: self._marks[name] for name in phases}
        return moved

    def standing(self, workers: Iterable[Worker]) -> Standing | None:
        """The one of these workers that has stood for longest, beyond serving; None: none does."""
        names = {worker.worker_id for worker in workers}
        standings = [
            Standing(name, mark.phase, mark.since_s, mark.limit_s)
            for name, mark in self._marks.items()
            if name in names and mark.phase.name != Phase.SERVING
        ]
        return min(standings, key=lambda phase: phase.since_s, default=None)


def words(phase: WorkerPhase) -> str:
    """A phase and how far it is, for people."""
    number = f" {phase.number}" if phase.number >= 0 else ""
    if phase.name in _IN_BYTES and phase.total > 0:
        return f"{phase.name}{number}, {_of_bytes(phase.done, phase.total)}"
    if phase.name == Phase.STEPPING and phase.done:
        return f"{phase.name}{number}, {phase.done:g} micro-batches done"
    return f"{phase.name}{number}"


def _own(worker: Worker) -> WorkerPhase | None:
    return next((p for p in worker.phases if not p.job_id and p.name in _NAMES), None)


def _of_bytes(done: float, total: float) -> str:
    power = 0
    while total >= 1000.0 and power < len(_PREFIXES) - 1:
        done, total, power = done / 1000.0, total / 1000.0, power + 1
    return f"{done:.1f} of {total:.1f} {_PREFIXES[power]}B"
