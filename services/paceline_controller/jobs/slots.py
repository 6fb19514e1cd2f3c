"""A wanted process across restarts: when it may start, when it hangs, when to give up."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.service import ControllerOptions
from paceline.enums import WorkerKind
from paceline.server.restarts import RestartBackoff
from paceline_controller.jobs.plan import Wanted

CHECK_EVERY_S = 5.0


@dataclass(slots=True)
class ProcessSlot:
    """Counts failures. Trainers make progress by steps, others by being ready for `stable_s`."""

    wanted: Wanted
    restarts: RestartBackoff
    running: bool = False
    fruitless: int = 0  # failures since it last made progress
    words: str = ""  # the reason of the last failure
    best_step: int = 0
    checked_s: float = 0.0
    answered_s: float = 0.0  # or started
    ready_since_s: float | None = None

    @classmethod
    def of(cls, wanted: Wanted, options: ControllerOptions) -> ProcessSlot:
        """A slot that has not started yet."""
        return cls(wanted, RestartBackoff(max_s=options.max_restart_backoff_s))

    def began(self, now_s: float) -> None:
        """It was started, or adopted."""
        self.running = True
        self.checked_s = self.answered_s = now_s
        self.ready_since_s = None

    def due_for_check(self, now_s: float) -> bool:
        """Always until it is first ready, then every `CHECK_EVERY_S`."""
        return self.ready_since_s is None or now_s - self.checked_s >= CHECK_EVERY_S

    def checked(self, now_s: float, *, ready: bool) -> None:
        """Record the result of a health check."""
        self.checked_s = now_s
        if not ready:
            return
        self.answered_s = now_s
        if self.ready_since_s is None:
            self.ready_since_s = now_s
        by_steps = self.wanted.kind is WorkerKind.TRAINER
        if not by_steps and now_s - self.ready_since_s >= self.restarts.stable_s:
            self.fruitless = 0

    def waits(self, now_s: float) -> None:
        """It is pending, so that a missing answer means nothing."""
        self.answered_s = now_s

    def stepped(self, step: int) -> None:
        """Its job is at `step`; a new one is progress."""
        if step > self.best_step:
            self.best_step = step
            self.fruitless = 0

    def hangs(self, now_s: float, timeout_s: float) -> bool:
        """Whether it has not answered for `timeout_s`."""
        return self.running and now_s - self.answered_s > timeout_s

    def ended(self, now_s: float) -> None:
        """It died, hung or could not be started."""
        since = self.ready_since_s
        lived_s = 0.0 if since is None else now_s - since
        self.restarts.failed(now_s, lived_s=lived_s)
        self.running = False
        self.ready_since_s = None
        self.fruitless += 1

    def may_start(self, now_s: float) -> bool:
        """Whether it is not running and its backoff is over."""
        return not self.running and now_s >= self.restarts.due_s
