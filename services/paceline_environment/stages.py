"""What open episodes wait for, and what became of the others."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

STAGES = ("generate", "step", "score", "submit")


@dataclass(slots=True)
class Stages:
    """Counters of one worker."""

    waiting: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    finished: int = 0
    infra_errors: int = 0
    restarted: int = 0  # episodes that could not be resumed
    tokens_lost: int = 0  # theirs

    @contextmanager
    def wait(self, stage: str) -> Generator[None]:
        """Inside, one more episode waits for `stage`."""
        self.waiting[stage] += 1
        try:
            yield
        finally:
            self.waiting[stage] -= 1
