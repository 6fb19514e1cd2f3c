"""What a trainer should be getting on with: whatever it computes at the moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.progress import Progress, Pulse
from paceline_trainer.trainer import Clock, Trainer

# In the other phases it waits: for a batch, for the ledger, for the other ranks to have theirs.
PHASES = ("stepping", "checkpointing", "publishing")


class Vitals:
    """One rank, as its probes see it; `trainer` gives None until it is built."""

    def __init__(self, *, clock: Clock, trainer: Callable[[], Trainer | None]) -> None:
        self._clock = clock
        self._trainer = trainer

    def register(self, progress: Progress) -> None:
        """Let the probes look. Each kind of work has its own time: a first step compiles."""
        for phase in PHASES:
            progress.watch(phase, partial(self.work, phase), uneven=True)
        progress.tell(self.facts)

    def work(self, phase: str) -> Pulse:
        """Whether something is being computed in this phase, and how often that has ended."""
        trainer = self._trainer()
        busy = trainer is not None and trainer.computing and self._clock.phase == phase
        return Pulse(int(busy), self._clock.ended.get(phase, 0))

    def facts(self) -> dict[str, Any]:
        """For people."""
        trainer = self._trainer()
        return {"phase": self._clock.phase, "step": None if trainer is None else trainer.step}
