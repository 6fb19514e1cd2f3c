"""A wanted process across restarts: when it may start, when it hangs, when to give up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.config.service import ControllerOptions
from paceline.enums import WorkerKind
from paceline.platform.server.failures import OOM
from paceline.platform.server.restarts import RestartBackoff
from paceline_controller.jobs.plan import Wanted

CHECK_EVERY_S = 5.0
GIVE_UP_AFTER_LASTING = 3
"""Failures for a reason that no restart changes, until the job fails."""
QUARANTINE_S = 600.0
"""Pause of a worker whose engine gets wrong what another one serves, `GIVE_UP_AFTER_LASTING` times
in a row: until then, its job goes on without it."""
STEADY_S = 600.0
"""A job's worker that was ready for so long has made progress, also if its job has not."""
# Missing modules, wrong settings or options of a program, no memory for the model.
_LASTING_AT_START = re.compile(
    rf"^{re.escape(OOM)}|\b(ModuleNotFound|Import|Config|Invalid|OutOfMemory)Error\b"
    r"|unrecognized arguments|the following arguments are required"
)
_REFUSED_WEIGHTS = re.compile(r"\bRefusedWeightsError\b")


def refuses_weights(words: str) -> bool:
    """Whether these last words of a worker are that its engine gets weights wrong."""
    return _REFUSED_WEIGHTS.search(words) is not None


@dataclass(slots=True)
class ProcessSlot:
    """Counts failures since progress: a step of the job, or being ready.

    Trainers have to step, a job's other workers to be ready for `STEADY_S`, and shared pools for
    the `stable_s` of their restarts.
    """

    wanted: Wanted
    restarts: RestartBackoff
    running: bool = False
    fruitless: int = 0  # failures since it last made progress
    refusals: int = 0  # failures in a row in which its engine refused weights
    quarantined: bool = False
    words: str = ""  # the reason of the last failure
    best_step: int = 0
    checked_s: float = 0.0
    answered_s: float = 0.0  # or started
    ready_since_s: float | None = None
    failed_at_start: bool = False  # the last failure, before it was ready

    @classmethod
    def of(cls, wanted: Wanted, options: ControllerOptions) -> ProcessSlot:
        """A slot that has not started yet."""
        return cls(wanted, RestartBackoff(max_s=options.max_restart_backoff_s))

    def began(self, now_s: float) -> None:
        """Record a start or adoption."""
        self.running, self.quarantined = True, False
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
        enough_s = STEADY_S if self.wanted.job_id else self.restarts.stable_s
        if not by_steps and now_s - self.ready_since_s >= enough_s:
            self.fruitless = self.refusals = 0

    def waits(self, now_s: float) -> None:
        """Record that it is pending, so that a missing answer means nothing."""
        self.answered_s = now_s

    def stepped(self, step: int) -> None:
        """Record that its job is at `step`; a new step is progress."""
        if step > self.best_step:
            self.best_step = step
            self.fruitless = 0

    def hangs(self, now_s: float, timeout_s: float) -> bool:
        """Whether it has not answered for `timeout_s`."""
        return self.running and now_s - self.answered_s > timeout_s

    def ended(self, now_s: float) -> None:
        """Record that it died, hung or could not be started."""
        since = self.ready_since_s
        self.failed_at_start = since is None
        lived_s = 0.0 if since is None else now_s - since
        self.restarts.failed(now_s, lived_s=lived_s)
        self.running = False
        self.ready_since_s = None
        self.fruitless += 1

    def quarantine(self, now_s: float, *, alone: bool) -> bool:
        """Keep it from starting for `QUARANTINE_S`, unless it is `alone`; whether it is kept.

        The reason is an engine that gets weights wrong again and again.
        """
        self.refusals = self.refusals + 1 if refuses_weights(self.words) else 0
        self.quarantined = self.refusals >= GIVE_UP_AFTER_LASTING and not alone
        if self.quarantined:
            self.restarts.due_s = now_s + QUARANTINE_S
            self.fruitless = 0
        return self.quarantined

    def most_failures(self, options: ControllerOptions, *, alone: bool) -> int:
        """Failures without progress until its job fails.

        They are few for a reason that no restart changes, if it is `alone`: no other worker of its
        job and kind is ready, which would show that this machine is the reason.
        """
        lasting = refuses_weights(self.words) or (
            self.failed_at_start and _LASTING_AT_START.search(self.words)
        )
        few = min(options.give_up_after, GIVE_UP_AFTER_LASTING)
        return few if alone and lasting else options.give_up_after

    def failures(self) -> str:
        """How often it has failed, and the last time how, for people."""
        if self.quarantined:
            return f"{self.wanted.name} is quarantined for {QUARANTINE_S / 60:g} min: {self.words}"
        times = "once" if self.fruitless == 1 else f"{self.fruitless} times"
        return f"{self.wanted.name} failed {times} without progress: {self.words}"

    @property
    def in_trouble(self) -> bool:
        """Whether it does not get on.

        One failure of a worker that was ready is no trouble yet, unless it is wrong, not lost.
        """
        starting = not self.running or self.ready_since_s is None
        failing = starting and self.fruitless == 1 and (self.failed_at_start or self.refusals)
        return self.quarantined or self.fruitless > 1 or bool(failing)

    def may_start(self, now_s: float) -> bool:
        """Whether it is not running and its backoff is over."""
        return not self.running and now_s >= self.restarts.due_s
