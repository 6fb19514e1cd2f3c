"""What open episodes wait for, and what became of the others."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

    @contextmanager
    def wait(self, stage: str) -> Generator[None]:
        """Inside, one more episode waits for `stage`."""
        self.waiting[stage] += 1
        try:
            yield
        finally:
            self.waiting[stage] -= 1
            self.left[stage] += 1

    def waits_on(self, service: str) -> AbstractContextManager[None]:
        """Inside, one more episode waits for a service."""
        return nullcontext() if self.usage is None else self.usage.wait(service)
