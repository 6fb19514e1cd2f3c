"""The controller's client of the experience service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.config import JobSpec, job_of
from paceline.enums import JobState
from paceline.errors import InvalidError, NotFoundError
from paceline.front.api.tenants import Tenant, tenant_from
from paceline.platform import wire
from paceline.platform.server.job_records import fetch_job
from paceline.platform.transport.rpc import call
from paceline.types import Job
from paceline.v1 import experience_pb2, jobs_pb2, tenants_pb2
from paceline_controller.jobs.plan import LiveJob, Wanted

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.tenants_pb2_grpc import TenantsAsyncStub

LIVE = [state for state in JobState if not state.terminal]
TIMEOUT_S = 5.0


class GrpcJobRegistry:
    """Jobs, incarnations and credentials over gRPC."""

    def __init__(
        self,
        *,
        jobs: JobsAsyncStub,
        experience: ExperienceAsyncStub,
        tenants: TenantsAsyncStub,
    ) -> None:
        self._jobs = jobs
        self._tenants = tenants
        self._experience = experience
        self._specs: dict[str, JobSpec] = {}  # immutable once accepted

    async def live_jobs(self) -> list[LiveJob]:
        """All jobs that are not over."""
        listed = [await self._live(job) for job in await self._list(LIVE)]
        jobs = [live for live in listed if live is not None]
        self._specs = {job.job_id: job.spec for job in jobs}
        return jobs

    async def untracked(self) -> bool:
        """Whether the trackers of some job are unfinished."""
        return any(_is_untracked(job) for job in await self._list([]))

    async def tenants(self) -> dict[str, Tenant]:
        """Quota and usage by tenant; tenants without jobs and quota are missing."""
        request = tenants_pb2.ListTenantsRequest()
        reply = await call(self._tenants.ListTenants, request, timeout_s=TIMEOUT_S)
        return {tenant.name: tenant_from(tenant) for tenant in reply.tenants}

    async def grant_incarnation(self, job_id: str) -> int:
        """Number the next start of a trainer."""
        request = experience_pb2.GrantIncarnationRequest(job_id=job_id)
        reply = await call(self._experience.GrantIncarnation, request, timeout_s=TIMEOUT_S)
        return reply.incarnation

    async def credential(self, wanted: Wanted, *, worker: str, incarnation: int) -> str:
        """The credential of workers of a job, for whatever starts them."""
        request = experience_pb2.IssueCredentialRequest(
            job_id=wanted.job_id,
            kind=wire.number_of(wanted.kind),
            worker=worker,
            incarnation=incarnation,
        )
        reply = await call(self._experience.IssueCredential, request, timeout_s=TIMEOUT_S)
        return reply.credential

    async def report_failure(self, job_id: str, reason: str) -> tuple[int, str]:
        """The newest incarnation has failed; returns the number of failures, and the reason."""
        request = experience_pb2.ReportFailureRequest(job_id=job_id, reason=reason)
        reply = await call(self._experience.ReportFailure, request, timeout_s=TIMEOUT_S)
        return reply.failures, reply.reason

    async def set_state(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        """Move a job to another state."""
        request = experience_pb2.SetJobStateRequest(
            job_id=job_id, state=wire.number_of(state), reason=reason
        )
        await call(self._experience.SetJobState, request, timeout_s=TIMEOUT_S)

    async def _spec(self, job_id: str) -> JobSpec | None:
        """The spec, which lists do not contain; None: this version cannot parse it, or it is gone.

        Cached at once, so that a later error does not fetch all specs again.
        """
        if job_id in self._specs:
            return self._specs[job_id]
        try:
            job = await fetch_job(self._jobs, job_id, timeout_s=TIMEOUT_S)
        except NotFoundError:
            return None
        try:
            self._specs[job_id] = job_of(job)
        except InvalidError:
            return None
        return self._specs[job_id]

    async def _list(self, states: Sequence[JobState]) -> list[Job]:
        jobs: list[Job] = []
        token, wanted = "", [wire.number_of(state) for state in states]
        while True:
            request = jobs_pb2.ListJobsRequest(state=wanted, page_size=1000, page_token=token)
            reply = await call(self._jobs.ListJobs, request, timeout_s=TIMEOUT_S)
            jobs += [wire.from_proto(job, Job) for job in reply.jobs]
            token = reply.next_page_token
            if not token:
                return jobs

    async def _live(self, job: Job) -> LiveJob | None:
        """None: its spec cannot be read; the experience service ends the job."""
        status = job.status
        spec = await self._spec(status.job_id)
        if spec is None:
            return None
        return LiveJob(
            status.job_id,
            status.state,
            status.step,
            spec,
            age_s=status.age_s,
            reason=status.reason,
        )


def _is_untracked(job: Job) -> bool:
    return any(tracker.state not in {"done", "failed"} for tracker in job.status.tracking)
