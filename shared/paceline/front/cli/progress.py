"""Shows the progress of a job as a live table in a terminal, or as plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.enums import JobState, TrackerState
from paceline.front.api.documents import JobEvent, JobView
from paceline.front.cli.report import counts
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.client.client import Client
from paceline.platform.progress import LedgerProgress
from paceline.platform.text import human_seconds, visible
from paceline.types import JobStatus, TrackerStatus

WINDOW_S, STEPS_WINDOW_S = 15.0, 600.0
LINE_EVERY_S = 5.0
_AILING = (TrackerState.RETRYING, TrackerState.FAILED)
_DONE = ("trained", "durable")
_ORDER = (
    *(
        "state",
        "step",
        "tasks",
        "elapsed",
        "left",
        "reward",
        "held-out reward",
        "held-out scores",
        "other evals",
    ),
    *("staleness", "tokens/s", "episodes/s", "waiting", "failing", "own code"),
    "tracking",
)


@dataclass(slots=True)
class Rate:
    """Growth of a counter per second over the last `window_s`."""

    window_s: float = WINDOW_S
    points: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])

    def add(self, now_s: float, value: float) -> None:
        """Record the current value of the counter."""
        if self.points and value < self.points[-1][1]:
            self.points.clear()
        self.points.append((now_s, value))
        while len(self.points) > 2 and now_s - self.points[0][0] > self.window_s:
            self.points.popleft()

    @property
    def per_s(self) -> float | None:
        """Growth per second; None until two points are known."""
        if len(self.points) < 2 or self.points[-1][0] == self.points[0][0]:
            return None
        (first_s, first), (last_s, last) = self.points[0], self.points[-1]
        return (last - first) / (last_s - first_s)


@dataclass(slots=True)
class JobProgress:
    """The latest values worth showing, updated from events."""

    target_steps: int = 0
    trains: bool = True
    limit_s: float | None = None  # seconds of running after which the job ends
    status: dict[str, str] = field(default_factory=dict[str, str])
    main_eval: str = ""  # name of the evaluation that the job's status is about
    partial: str = ""  # its newest run, if it measured too few tasks to count
    others: dict[str, str] = field(default_factory=dict[str, str])  # other evaluations, by name
    steps: Rate = field(default_factory=lambda: Rate(STEPS_WINDOW_S))
    tokens: Rate = field(default_factory=Rate)
    episodes: Rate = field(default_factory=Rate)
    wait: Rate = field(default_factory=Rate)
    failed: Rate = field(default_factory=Rate)

    def update(self, event: JobEvent, now_s: float) -> None:
        """Update from one event."""
        status, live = event.status, event.live
        steps = f"{status.step}/{self.target_steps}" if self.target_steps else str(status.step)
        state = f"{status.state}: {status.reason}" if status.reason else str(status.state)
        self.status["state"] = state
        if self.trains:
            self.status["step"] = steps
        elif live and live.eval:
            self.status["tasks"] = f"{live.eval.measured}/{live.eval.total}"
        else:
            self.status.pop("tasks", None)
        self._note_time(status, now_s)
        if status.tracking:
            self.status["tracking"] = ", ".join(map(tracked, status.tracking))
        for row in event.metrics:
            if row.kind == "train":
                self._note_step(row.values)
            elif row.values.get("set", "") == self.main_eval:
                self.partial = partial_eval({"step": row.step, **row.values})
                self._note_scores(row.values)
            else:
                self._note_other(row.step, row.values)
        self._note_eval(status)
        if live:
            tokens = live.tokens_generated if self.trains else live.eval_tokens
            self.tokens.add(now_s, float(tokens))
            done = sum(live.counts.get(name, 0) for name in _DONE)
            self.episodes.add(now_s, float(done))
        self._put("tokens/s", self.tokens.per_s, "{:,.0f}")
        if self.trains:
            self._put("episodes/s", self.episodes.per_s, "{:,.1f}")
        if live:
            self.wait.add(now_s, live.trainer_wait_total_s)
            if self.trains:
                self._note_waits(status.state, live)
            self._note_failures(live, now_s)

    def line(self) -> str:
        """All values on one line."""
        return "  ".join(f"{name} {value}" for name, value in self._ordered())

    def table(self, title: str) -> Table:
        """All values, one row each."""
        grid = Table.grid(padding=(0, 2))
        grid.add_row("[bold]job[/]", title)
        for name, value in self._ordered():
            grid.add_row(f"[bold]{name}[/]", Text(value))  # reasons quote anything
        return grid

    def _ordered(self) -> list[tuple[str, str]]:
        return [(name, visible(self.status[name])) for name in _ORDER if name in self.status]

    def _note_time(self, status: JobStatus, now_s: float) -> None:
        """How long the job runs, or waits to, and about how long its steps will take."""
        self.status["elapsed"] = human_seconds(status.runtime_s or status.age_s)
        last = self.steps.points[-1][1] if self.steps.points else 0  # before, models are loaded
        if status.step != last:
            self.steps.add(now_s, float(status.step))
        self.status.pop("left", None)
        if status.state is not JobState.RUNNING or not self.trains:
            return
        limits = [] if self.limit_s is None else [self.limit_s - status.runtime_s]
        if self.target_steps and (per_s := self.steps.per_s):
            limits.append((self.target_steps - status.step) / per_s)
        if limits:
            self.status["left"] = f"about {human_seconds(min(limits))}"

    def _note_waits(self, state: JobState, live: LedgerProgress) -> None:
        self.status.pop("waiting", None)
        if state is JobState.STARTING:
            self.status["waiting"] = "trainer and rollout to load the model"
        elif state is JobState.RUNNING:
            self.status["waiting"] = waiting(self.wait.per_s or 0.0, live.headroom_groups)

    def _note_eval(self, status: JobStatus) -> None:
        counted = status.eval_reward is not None
        parts = [f"{status.eval_reward:.3f} (step {status.eval_step})"] if counted else []
        if self.partial:
            parts.append(self.partial)
        if parts:
            self.status["held-out reward"] = "; ".join(parts)

    def _note_scores(self, values: Mapping[str, Any]) -> None:
        if counts({"values": values}) and (text := scores(values)):
            self.status["held-out scores"] = text

    def _note_other(self, step: int, values: Mapping[str, Any]) -> None:
        """An evaluation besides the main one."""
        reward = values.get("reward")
        if counts({"values": values}) and isinstance(reward, (int, float)):
            text = ", ".join(filter(None, (f"{reward:.3f}", scores(values))))
            self.others[values["set"]] = f"{values['set']} {text} (step {step})"
            self.status["other evals"] = "; ".join(self.others.values())

    def _note_failures(self, live: LedgerProgress, now_s: float) -> None:
        """Attempts that failed in the last seconds, with the reason of the newest."""
        self.failed.add(now_s, float(live.failed_attempts))
        per_s = self.failed.per_s
        if per_s or live.back_off_s or (per_s is None and live.failed_attempts):
            count = f"{live.failed_attempts:,} attempts of episodes so far"
            again = f"; the next in {live.back_off_s:.0f} s" if live.back_off_s else ""
            self.status["failing"] = f"{count}{again}, the last: {live.last_failure}"
        else:
            self.status.pop("failing", None)
        if live.unanswered:
            self.status["own code"] = live.unanswered
        else:
            self.status.pop("own code", None)

    def _note_step(self, values: Mapping[str, Any]) -> None:
        self._put("reward", values.get("reward_mean"), "{:.3f}")
        self._put("staleness", values.get("staleness_mean"), "{:.2f} steps")

    def _put(self, name: str, value: Any, pattern: str) -> None:
        if isinstance(value, (int, float)):
            self.status[name] = pattern.format(value)


def scores(values: Mapping[str, Any]) -> str:
    """pass@k and maj@k of an eval, by k; empty if it has none."""
    metrics = sorted((int(name.partition("@")[2]), name) for name in values if "@" in name)
    return ", ".join(f"{name} {values[name]:.3f}" for _, name in metrics)


def partial_eval(last: Mapping[str, Any]) -> str:
    """A note on an eval that measured too few of its tasks to count; empty for any other."""
    if last.get("complete") is not False:
        return ""
    reward = last["reward"]
    shown = "no reward" if reward is None else f"{reward:.3f}"
    many = f"{last['measured']} of {last['of']} measured"
    return f"{shown} at step {last['step']} does not count: {many}"


def main_eval_of(spec: Mapping[str, Any]) -> str:
    """Name of the evaluation that the status of a job with this spec is about."""
    return "" if spec.get("eval") else min(spec.get("evals") or {}, default="")


def tracked(tracker: TrackerStatus) -> str:
    """The URL of a tracker, or what is wrong with it."""
    shown = tracker.url or tracker.state
    return f"{tracker.name} {tracker.detail if tracker.state in _AILING else shown}"


def waiting(trainer_share: float, headroom_groups: int) -> str:
    """Which side waits; `trainer_share` is the share of time that the trainer had no batch."""
    sides: list[str] = []
    if trainer_share > 0.02:
        sides.append(f"trainer for episodes ({min(trainer_share, 1.0):.0%} of the time)")
    # A trainer without a batch does not hold up rollout, whatever does.
    if headroom_groups <= 0 and trainer_share < 0.98:
        sides.append("rollout for trainer (it is as far ahead as max_staleness allows)")
    return ", ".join(sides) or "nobody"


def follow(
    client: Client,
    job_id: str,
    *,
    quiet: bool,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> JobView:
    """Show a job's progress until it ends; returns the job."""
    job = client.get(job_id)
    if quiet:
        return client.wait(job_id)
    console = console or SafeConsole()
    stop = job.spec.get("stop", {})
    progress = JobProgress(
        target_steps=int(stop.get("steps", 0)),
        limit_s=stop.get("wall_s"),
        trains=job.spec.get("kind", "train") == "train",
        main_eval=main_eval_of(job.spec),
    )
    shown_s = float("-inf")
    with Live(console=console) if console.is_terminal else nullcontext() as live:
        for event in client.watch(job_id):
            progress.update(event, clock())
            if live is not None:
                live.update(progress.table(job_id))
            elif event.status.state.terminal or clock() - shown_s >= LINE_EVERY_S:
                shown_s = clock()
                console.print(progress.line(), soft_wrap=True, highlight=False, markup=False)
    return client.get(job_id)
