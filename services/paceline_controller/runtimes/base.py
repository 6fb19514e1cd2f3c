"""The interface between the reconciler and a platform that runs workloads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.plan import Wanted

ONLY_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""Environment of a trainer that is started without torchrun, as torchrun would set it."""


class CredentialIssuer(Protocol):
    """Issues the credentials of jobs' trainers and rollout workers."""

    async def credential(self, wanted: Wanted, *, worker: str, incarnation: int) -> str:
        """A credential for the worker of this name, or for all workers whose names begin with it.

        Raises:
            PacelineError: the experience service refuses or cannot be reached.
        """
        ...


class Runtime(Protocol):
    """Starts, finds, observes and ends workloads by name."""

    def units(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """The units that get a name of their own: whole workloads, or single replicas."""
        ...

    async def list(self) -> list[Observed]:
        """All units that were started and not stopped since, dead or alive."""
        ...

    async def start(self, wanted: Wanted, *, incarnation: int) -> None:
        """Start it, after removing what an earlier run of it has left behind."""
        ...

    async def stop(self, name: str, *, grace_s: float) -> None:
        """Drain it, then kill it and its child processes; returns when it is gone."""
        ...

    async def scale(self, name: str, replicas: int) -> None:
        """Change the number of replicas of a running unit; removed ones are drained."""
        ...

    async def ready(self, name: str) -> bool:
        """Whether it passes its health check."""
        ...

    async def last_words(self, name: str) -> str:
        """The end of its output, for error messages."""
        ...

    def waits_for(self, job_id: str) -> str:
        """Why workloads of a job are not running yet, for people; empty if nothing blocks them."""
        ...

    async def close(self) -> None:
        """Release resources without stopping any workload."""
        ...
