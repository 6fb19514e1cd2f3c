"""Liveness of a trainer: the phases in which it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from paceline.platform.server.liveness import ProcessProgress, WorkProgress
from paceline_trainer.phase_clock import PhaseClock
from paceline_trainer.work_thread import WorkThread

# In other phases it waits for a batch, for the ledger or for the other ranks.
PHASES = ("stepping", "checkpointing", "publishing")


class RankWork(Protocol):
    """What a rank does once it is built."""

    @property
    def compute(self) -> WorkThread:
        """Its thread that computes."""
        ...

    @property
    def writer(self) -> WorkThread | None:
        """Its thread that writes checkpoints; None: it writes none."""
        ...

    @property
    def step(self) -> int:
        """Steps trained."""
        ...


class TrainerLiveness:
    """The work that a rank's probes watch; `trainer` returns None until it is built."""

    def __init__(self, *, clock: PhaseClock, trainer: Callable[[], RankWork | None]) -> None:
        self._clock = clock
        self._trainer = trainer

    def register(self, progress: ProcessProgress) -> None:
        """Register the work of this rank with its probes; `uneven`, as a first step compiles."""
        for phase in PHASES:
            progress.watch(phase, partial(self.work, phase), uneven=True)
        progress.watch("writing", self.writing, uneven=True)
        progress.add_status(self.status)

    def work(self, phase: str) -> WorkProgress:
        """Whether this phase is computing, and how often it has ended."""
        trainer = self._trainer()
        busy = trainer is not None and trainer.compute.busy and self._clock.phase == phase
        return WorkProgress(int(busy), self._clock.ended.get(phase, 0))

    def writing(self) -> WorkProgress:
        """Whether a checkpoint is being written, and how much has been."""
        trainer = self._trainer()
        writer = None if trainer is None else trainer.writer
        if writer is None:
            return WorkProgress(0, 0)
        return WorkProgress(int(writer.busy), writer.num_done)

    def status(self) -> dict[str, Any]:
        """Fields for `/statusz`."""
        trainer = self._trainer()
        return {"phase": self._clock.phase, "step": None if trainer is None else trainer.step}
