"""Counts what open episodes wait for, and how finished ones ended."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from paceline.server.liveness import WorkProgress
from paceline.telemetry.usage import Usage

# room: waiting for a slot, in generate; load: until an environment is loaded in a process
STAGES = ("room", "generate", "step", "load", "score", "submit")


@dataclass(slots=True)
class Stages:
    """Counters of one worker."""

    waiting: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    left: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    finished: int = 0
    infra_errors: int = 0
    restarted: int = 0  # episodes that could not be resumed
    tokens_lost: int = 0  # of those
    tokens_resumed: int = 0  # sampled before a failure and kept
    tokens_received: int = 0  # from rollout workers
    usage: Usage | None = None

    def progress(self) -> WorkProgress:
        """Environment steps in progress and done; all other stages wait for another service."""
        return WorkProgress(self.waiting["step"], self.left["step"])

    def status(self) -> dict[str, Any]:
        """Fields for `/statusz`."""
        return {"waiting": dict(self.waiting), "finished": self.finished}

    def wait(self, stage: str) -> AbstractContextManager[None]:
        """Count an episode as waiting for `stage` inside the context."""
        return _InStage(self, stage)

    def waits_on(self, service: str) -> AbstractContextManager[None]:
        """Count an episode as waiting for a service inside the context."""
        return nullcontext() if self.usage is None else self.usage.wait(service)


class _InStage:
    """A class, as it is three times as fast as a generator and every episode enters several."""

    __slots__ = ("_stage", "_stages")

    def __init__(self, stages: Stages, stage: str) -> None:
        self._stages = stages
        self._stage = stage

    def __enter__(self) -> None:
        self._stages.waiting[self._stage] += 1

    def __exit__(self, *_: object) -> None:
        self._stages.waiting[self._stage] -= 1
        self._stages.left[self._stage] += 1
