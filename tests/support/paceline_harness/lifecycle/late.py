"""Requests of a controller that arrive after its successor has taken over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.enums import JobState
from paceline_controller.jobs.plan import LiveJob
from paceline_controller.registry import GrpcJobRegistry


@dataclass(frozen=True, slots=True)
class LateRequest:
    """`SetJobState` of a controller that saw the job in another state, `seen`."""

    job_id: str
    seen: JobState
    state: JobState
    reason: str

    def is_stale(self, now: JobState) -> bool:
        """Whether the job has moved on since the controller decided on the request."""
        return now not in (self.seen, self.state)


class HoldingRegistry(GrpcJobRegistry):
    """The registry of a controller whose next `SetJobState` may be held in the network."""

    _holds = False
    _seen: dict[str, JobState]
    _held: asyncio.Future[LateRequest]

    async def hold(self, *, within_s: float) -> LateRequest | None:
        """Hold the next request; None: the controller makes none. It waits until it is killed."""
        self._held = asyncio.get_running_loop().create_future()
        self._holds = True
        done, _ = await asyncio.wait({self._held}, timeout=within_s)
        return self._held.result() if done else None

    async def live_jobs(self) -> list[LiveJob]:
        """All jobs that are not over."""
        found = await super().live_jobs()
        self._seen = {job.job_id: job.state for job in found}
        return found

    async def set_state(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        """Move a job to another state, unless requests are held."""
        if not self._holds:
            await super().set_state(job_id, state, reason=reason)
            return
        if not self._held.done():
            self._held.set_result(LateRequest(job_id, self._seen[job_id], state, reason))
        await asyncio.Event().wait()
