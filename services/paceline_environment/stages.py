"""What open episodes wait for, and what became of the others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from paceline.progress import Pulse
from paceline.usage import Usage

STAGES = ("room", "generate", "step", "score", "submit")  # room: before and in generate


@dataclass(slots=True)
class Stages:
    """Counters of one worker."""

    waiting: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    left: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    finished: int = 0
    infra_errors: int = 0
    restarted: int = 0  # episodes that could not be resumed
    tokens_lost: int = 0  # theirs
    tokens_resumed: int = 0  # sampled by a worker that failed, gone on from elsewhere
    usage: Usage | None = None

    def pulse(self) -> Pulse:
        """Steps of worlds under way, and those that have ended; all else waits for others."""
        return Pulse(self.waiting["step"], self.left["step"])

    def facts(self) -> dict[str, Any]:
        """For people."""
        return {"waiting": dict(self.waiting), "finished": self.finished}

    def wait(self, stage: str) -> AbstractContextManager[None]:
        """Inside, one more episode waits for `stage`."""
        return _Inside(self, stage)

    def waits_on(self, service: str) -> AbstractContextManager[None]:
        """Inside, one more episode waits for a service."""
        return nullcontext() if self.usage is None else self.usage.wait(service)


class _Inside:
    """Every episode goes through several: a class is three times as fast as a generator."""

    __slots__ = ("_stage", "_stages")

    def __init__(self, stages: Stages, stage: str) -> None:
        self._stages = stages
        self._stage = stage

    def __enter__(self) -> None:
        self._stages.waiting[self._stage] += 1

    def __exit__(self, *_: object) -> None:
        self._stages.waiting[self._stage] -= 1
        self._stages.left[self._stage] += 1
