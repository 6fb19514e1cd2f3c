"""Protocols of the reconciler's collaborators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from paceline.enums import JobState
from paceline.front.api.tenants import Tenant
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.plan import LiveJob
from paceline_controller.scaling.decide import Bounds


class JobRegistry(Protocol):
    """The jobs, as the experience service keeps them."""

    async def live_jobs(self) -> list[LiveJob]:
        """All jobs that are not over."""
        ...

    async def grant_incarnation(self, job_id: str) -> int:
        """Number the next start of a trainer."""
        ...

    async def report_failure(self, job_id: str, reason: str) -> tuple[int, str]:
        """The newest incarnation has failed; returns failures without progress, and the reason."""
        ...

    async def set_state(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        """Move a job to another state, or set the reason why it waits."""
        ...

    async def tenants(self) -> Mapping[str, Tenant]:
        """Quota and usage of each tenant."""
        ...


class Sizing(Protocol):
    """Decides the replicas of scaled workloads."""

    async def sizes(
        self,
        jobs: Iterable[LiveJob],
        observed: Iterable[Observed],
        *,
        bounds: Bounds,
        now_s: float,
    ) -> dict[str, int]:
        """Replicas by workload, within bounds."""
        ...
