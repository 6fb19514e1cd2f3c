"""What the reconciler needs of a place where processes run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline_controller.plan import Wanted


@dataclass(frozen=True, slots=True)
class Observed:
    """A process that was started, by this controller or by one before it."""

    name: str
    job_id: str
    alive: bool
    outdated: bool = False  # runs with settings that no longer hold: to be replaced


class Runtime(Protocol):
    """Starts, finds, observes and ends processes by name."""

    async def list(self) -> list[Observed]:
        """Everything that was started and not stopped since, dead or alive."""
        ...

    async def start(self, wanted: Wanted, *, incarnation: int) -> None:
        """Start it; what an earlier life of it left behind is removed first."""
        ...

    async def stop(self, name: str, *, grace_s: float) -> None:
        """Let it drain, then kill it with all it has started; returns when it is gone."""
        ...

    async def ready(self, name: str) -> bool:
        """Whether it answers its health check."""
        ...

    async def last_words(self, name: str) -> str:
        """The end of its output, for people."""
        ...

    async def close(self) -> None:
        """Let go, without stopping anything."""
        ...
