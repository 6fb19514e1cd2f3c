"""The experience service as the controller sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline import wire
from paceline.config import JobSpec, parse_job
from paceline.errors import InvalidError, NotFoundError
from paceline.rpc import call
from paceline.tenants import Tenant, tenant_from
from paceline.types import Job, JobState
from paceline.v1 import experience_pb2, jobs_pb2, tenants_pb2
from paceline_controller.plan import LiveJob

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.tenants_pb2_grpc import TenantsAsyncStub

LIVE = [state.value for state in JobState if not state.terminal]
TIMEOUT_S = 5.0


class RemoteLedger:
    """Jobs and incarnations over gRPC."""

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
        found = [live for live in listed if live is not None]
        self._specs = {job.job_id: job.spec for job in found}
        return found

    async def untracked(self) -> bool:
        """Whether a job has trackers that lack some of it."""
        return any(_is_untracked(job) for job in await self._list([]))

    async def tenants(self) -> dict[str, Tenant]:
        """What each tenant may use, and uses; those without jobs and quota are missing."""
        request = tenants_pb2.ListTenantsRequest()
        reply = await call(self._tenants.ListTenants, request, timeout_s=TIMEOUT_S)
        return {each.name: tenant_from(each) for each in reply.tenants}

    async def grant_incarnation(self, job_id: str) -> int:
        """The number of the next start of a trainer."""
        request = experience_pb2.GrantIncarnationRequest(job_id=job_id)
        reply = await call(self._experience.GrantIncarnation, request, timeout_s=TIMEOUT_S)
        return reply.incarnation

    async def report_failure(self, job_id: str, reason: str) -> tuple[int, str]:
        """The newest life of a trainer has ended badly: how many have, and why it did."""
        request = experience_pb2.ReportFailureRequest(job_id=job_id, reason=reason)
        reply = await call(self._experience.ReportFailure, request, timeout_s=TIMEOUT_S)
        return reply.failures, reply.reason

    async def set_state(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        """Move a job on."""
        request = experience_pb2.SetJobStateRequest(job_id=job_id, state=state, reason=reason)
        await call(self._experience.SetJobState, request, timeout_s=TIMEOUT_S)

    async def _spec(self, job_id: str) -> JobSpec | None:
        """What a list does not have; None: it is no job file that this version knows, or gone.

        Kept at once: what fails after it must not have all of them asked for again.
        """
        if job_id in self._specs:
            return self._specs[job_id]
        request = jobs_pb2.GetJobRequest(job_id=job_id)
        try:
            job = await call(self._jobs.GetJob, request, timeout_s=TIMEOUT_S, idempotent=True)
        except NotFoundError:
            return None
        try:
            self._specs[job_id] = parse_job(json.loads(job.spec_json))
        except (ValueError, InvalidError):
            return None
        return self._specs[job_id]

    async def _list(self, states: Sequence[str]) -> list[Job]:
        found: list[Job] = []
        token = ""
        while True:
            request = jobs_pb2.ListJobsRequest(states=states, page_size=1000, page_token=token)
            reply = await call(self._jobs.ListJobs, request, timeout_s=TIMEOUT_S)
            found += map(wire.job_from, reply.jobs)
            token = reply.next_page_token
            if not token:
                return found

    async def _live(self, job: Job) -> LiveJob | None:
        """None: nobody can tell what it needs; its ledger ends it."""
        status = job.status
        spec = await self._spec(status.job_id)
        if spec is None:
            return None
        return LiveJob(
            status.job_id,
            status.state,
            status.step,
            spec,
            age_s=status.created_s,
            reason=status.reason,
        )


def _is_untracked(job: Job) -> bool:
    return any(told.state not in {"done", "failed"} for told in job.status.tracking)
