"""What jobs may name that were accepted before functions of modules had to be listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import NotFoundError
from paceline.platform.server.job_records import fetch_job
from paceline.platform.telemetry.logs import Log
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

log = Log("accepted")


class AcceptedTargets:
    """Asks experience, which has the records of jobs: a caller cannot say so itself."""

    def __init__(self, jobs: JobsAsyncStub) -> None:
        self._jobs = jobs
        self._known: dict[str, AllowedTargets] = {}

    async def of(self, job_id: str) -> AllowedTargets:
        """Functions that are not listed and that this job may name nevertheless.

        Raises:
            PacelineError: experience cannot be reached.
        """
        if job_id not in self._known:
            try:
                job = await fetch_job(self._jobs, job_id, timeout_s=20.0)
            except NotFoundError:
                return NO_TARGETS
            found = AllowedTargets.of(job.unlisted)
            if not found.targets:
                return found
            log.warning("functions that are not listed are called", job=job_id, functions=found)
            self._known[job_id] = found
        return self._known[job_id]

    @property
    def jobs(self) -> set[str]:
        """Jobs that are remembered."""
        return {*self._known}

    def end(self, job_id: str) -> None:
        """The job is over."""
        self._known.pop(job_id, None)
