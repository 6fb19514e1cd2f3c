"""Calls of environments in progress: what they may take, and what they took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, cast

from paceline.errors import DeadlineError
from paceline.platform.telemetry.metrics import Metrics
from paceline_environment.stages import JobStages


class Loads(Protocol):
    """An environment that lives in a process where it has to be loaded first."""

    @property
    def is_loading(self) -> bool:
        """Whether a call waits for that."""
        ...

    def loading_s(self) -> float:
        """How long calls have waited for that."""
        ...


def loads_of(environment: Any) -> Loads | None:
    """The environment, if it is one that has to be loaded first."""
    return cast("Loads", environment) if _has_to_load(type(environment)) else None


@lru_cache(maxsize=256)
def _has_to_load(kind: type) -> bool:
    """By class: `isinstance` with a protocol would take a twentieth of an episode's CPU time."""
    return hasattr(kind, "is_loading") and hasattr(kind, "loading_s")


class EnvironmentCalls:
    """Times and limits of all calls of a worker.

    A timer and two counters for every call cost more than the call of a simple environment, so
    `sweep` ends what is overdue and exports what was counted; the worker calls it every so often.
    """

    def __init__(self, *, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._metrics = metrics
        self._open: set[EnvironmentCall] = set()
        self._finished: dict[str, tuple[int, float]] = {}  # calls and seconds, not exported yet

    def of(
        self,
        limit_s: float,
        task: asyncio.Task[None],
        loads: Loads | None = None,
        *,
        stages: JobStages,
    ) -> EnvironmentCall:
        """The calls of one episode, one at a time, which count in the `stages` of its job.

        In each `task` may spend `limit_s` seconds, besides those that `loads` says; it raises
        DeadlineError if `sweep` finds that it took longer.
        """
        return EnvironmentCall(self, stages, limit_s, task, loads)

    def sweep(self) -> None:
        """End calls that exceed their limit, and export the metrics of those that have ended."""
        now = self.clock()
        for call in self._open:
            call.show_loading()
            if now >= call.deadline + call.loading_s:
                call.expire()
        for name, (count, seconds) in self._finished.items():
            self._metrics.add("calls", count, call=name)
            self._metrics.add("call_seconds", seconds, call=name)
        self._finished.clear()

    def entered(self, call: EnvironmentCall) -> None:
        """A call begins."""
        self._open.add(call)
        call.stages.waiting[call.stage] += 1

    def moved(self, call: EnvironmentCall, stage: str) -> None:
        """A call has begun to wait for its environment to be loaded, or need not any more."""
        call.stages.waiting[call.stage] -= 1
        call.stages.left[call.stage] += 1
        call.stages.waiting[stage] += 1

    def left(self, call: EnvironmentCall) -> None:
        """A call has ended."""
        self._open.discard(call)
        call.stages.waiting[call.stage] -= 1
        call.stages.left[call.stage] += 1
        count, seconds = self._finished.get(call.name, (0, 0.0))
        self._finished[call.name] = (count + 1, seconds + call.seconds)


class EnvironmentCall:
    """One call after another, each cancelled like the block of an `asyncio.timeout`."""

    __slots__ = (
        "_cancelling",
        "_expired",
        "_limit_s",
        "_loaded_s",
        "_loads",
        "_owner",
        "_started",
        "_task",
        "deadline",
        "name",
        "seconds",
        "stage",
        "stages",
    )

    def __init__(
        self,
        owner: EnvironmentCalls,
        stages: JobStages,
        limit_s: float,
        task: asyncio.Task[None],
        loads: Loads | None,
    ) -> None:
        self.stages = stages
        self.stage = "step"
        self._loads = loads
        self._loaded_s = 0.0
        self.name = ""
        self.seconds = 0.0
        self.deadline = 0.0
        self._owner = owner
        self._limit_s = limit_s
        self._task = task
        self._started = 0.0
        self._cancelling = 0
        self._expired = False

    @property
    def loading_s(self) -> float:
        """Seconds of it in which the environment was loaded, so far."""
        return 0.0 if self._loads is None else self._loads.loading_s() - self._loaded_s

    def show_loading(self) -> None:
        """Count it where it waits now: a load has a limit of its own."""
        stage = "load" if self._loads is not None and self._loads.is_loading else "step"
        if stage != self.stage:
            self._owner.moved(self, stage)
            self.stage = stage

    def expire(self) -> None:
        """Cancel the call, once."""
        if not self._expired:
            self._expired = True
            self._task.cancel()

    def begin(self, name: str) -> EnvironmentCall:
        """A context for the next call."""
        self.name = name
        return self

    def __enter__(self) -> EnvironmentCall:
        self.stage, self._expired = "step", False
        if self._loads is not None:
            self._loaded_s = self._loads.loading_s()
        self._started = self._owner.clock()
        self.deadline = self._started + self._limit_s
        self._cancelling = self._task.cancelling()
        self._owner.entered(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.seconds = self._owner.clock() - self._started - self.loading_s
        self._owner.left(self)
        if not self._expired:
            return
        mine = self._task.uncancel() <= self._cancelling
        if mine and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise DeadlineError(
                f"environment: {self.name} took more than {self._limit_s:g} s"
            ) from None
