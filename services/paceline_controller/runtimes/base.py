"""What the reconciler needs of a place where processes run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from paceline_controller.jobs.plan import Wanted


@dataclass(frozen=True, slots=True)
class Observed:
    """A workload that was started, by this controller or by one before it."""

    name: str
    job_id: str
    alive: bool
    outdated: bool = False  # runs with settings that no longer hold: to be replaced
    replicas: int = 1  # asked for
    ready: int = 0  # of these, those that answer
    pending: bool = False  # the platform gets it to run, however long that takes


class Runtime(Protocol):
    """Starts, finds, observes and ends workloads by name."""

    def units(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """What is started under a name of its own: whole workloads, or each replica of them."""
        ...

    async def list(self) -> list[Observed]:
        """Everything that was started and not stopped since, dead or alive."""
        ...

    async def start(self, wanted: Wanted, *, incarnation: int) -> None:
        """Start it, after removing what an earlier run of it has left behind."""
        ...

    async def stop(self, name: str, *, grace_s: float) -> None:
        """Let it drain, then kill it with all it has started; returns when it is gone."""
        ...

    async def scale(self, name: str, replicas: int) -> None:
        """Change how many replicas a running unit has; those that go are drained."""
        ...

    async def ready(self, name: str) -> bool:
        """Whether it answers its health check."""
        ...

    async def last_words(self, name: str) -> str:
        """The end of its output, for people."""
        ...

    def waits_for(self, job_id: str) -> str:
        """What keeps workloads of a job from running, for people; empty if nothing does."""
        ...

    async def close(self) -> None:
        """Let go, without stopping anything."""
        ...
