"""One wanted process over all its lives: when it may start, when it hangs, when to give up."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.service import ControllerOptions
from paceline.restarts import Restarts
from paceline.types import WorkerKind
from paceline_controller.plan import Wanted

CHECK_EVERY_S = 5.0


@dataclass(slots=True)
class Slot:
    """Counts lives. A trainer gets on by steps, the others by answering for `stable_s`."""

    wanted: Wanted
    restarts: Restarts
    running: bool = False
    fruitless: int = 0  # lives that ended since it last got on
    words: str = ""  # how the last of them ended
    best_step: int = 0
    checked_s: float = 0.0
    answered_s: float = 0.0  # or started
    ready_since_s: float | None = None

    @classmethod
    def of(cls, wanted: Wanted, options: ControllerOptions) -> Slot:
        """A slot that has not started yet."""
        return cls(wanted, Restarts(most_s=options.restart_most_s))

    def began(self, now_s: float) -> None:
        """It was started, or found running."""
        self.running = True
        self.checked_s = self.answered_s = now_s
        self.ready_since_s = None

    def due_for_check(self, now_s: float) -> bool:
        """Often until it first answers, then now and then."""
        return self.ready_since_s is None or now_s - self.checked_s >= CHECK_EVERY_S

    def checked(self, now_s: float, *, ready: bool) -> None:
        """Its health check was answered, or not."""
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
        """Whoever runs it is at work on it: silence means nothing."""
        self.answered_s = now_s

    def stepped(self, step: int) -> None:
        """The trainer of its job has done so many steps."""
        if step > self.best_step:
            self.best_step = step
            self.fruitless = 0

    def hangs(self, now_s: float, timeout_s: float) -> bool:
        """It has not answered for too long."""
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
        """It does not run and its pause is over."""
        return not self.running and now_s >= self.restarts.due_s
