"""The phases of a trainer: the seconds of each, and the present one for the roster."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from paceline.enums import Phase
from paceline.platform.server.phase_report import PhaseReport
from paceline_trainer.step.model import PolicyModel

_NAMES = {
    "waiting": Phase.WAITING_FOR_BATCH,
    "stepping": Phase.STEPPING,
    "checkpointing": Phase.CHECKPOINTING,
    "publishing": Phase.PUBLISHING,
}


_METRICS = {
    "waiting": "wait_s",
    "stepping": "step_s",
    "checkpointing": "checkpoint_s",
    "publishing": "publish_s",
}


@dataclass(slots=True)
class PhaseClock:
    """Seconds by phase since the start, and the current phase."""

    phase: str = "loading"
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    ended: dict[str, int] = field(default_factory=dict[str, int])  # how often each phase has ended
    report: PhaseReport = field(default_factory=lambda: PhaseReport(Phase.LOADING_MODEL))
    _started: float | None = None  # of the current phase
    _told: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def measure(self, phase: str, step: int) -> Generator[None]:
        """Count the time inside the context as that of a phase, which is for a step."""
        before, self.phase = self.phase, phase
        self.report.enter(_NAMES[phase], number=step)
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

    def since_last(self) -> dict[str, float]:
        """Seconds by phase since the last call, as metrics of a step."""
        now = {name: self.seconds.get(phase, 0.0) for phase, name in _METRICS.items()}
        since = {name: value - self._told.get(name, 0.0) for name, value in now.items()}
        self._told = now
        return since


def report_loading(policy: PolicyModel, world: int, report: PhaseReport) -> None:
    """Say how many bytes of a policy this rank of `world` reads while it is sharded."""
    if policy.source is not None:
        report.enter(Phase.LOADING_MODEL, total=_num_bytes(policy.parameters()) / world)


def _num_bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(each.numel() * each.element_size() for each in tensors))
