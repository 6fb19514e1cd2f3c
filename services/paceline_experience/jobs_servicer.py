"""The job API over gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from paceline import wire
from paceline.access import Role, caller
from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import jobs_pb2_grpc, roster_pb2, types_pb2
from paceline.weights.wire import holdings_to
from paceline_experience.access.audit_log import AuditLog
from paceline_experience.desk import Desk, read_spec
from paceline_experience.history import Row
from paceline_experience.jobs import JobStore, unknown_job
from paceline_experience.ledgers import Ledgers
from paceline_experience.routes import Tracker


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """What users call, by way of the gateway. Jobs of other tenants do not exist for them."""

    def __init__(
        self,
        *,
        desk: Desk,
        jobs: JobStore,
        ledgers: Ledgers,
        tracker: Tracker,
        audit: AuditLog,
    ) -> None:
        self._desk = desk
        self._jobs = jobs
        self._ledgers = ledgers
        self._tracker = tracker
        self._audit = audit

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Any) -> types_pb2.Job:
        """Idempotent on (tenant, request_id)."""
        who = caller(context)
        async with self._audit.change(who, "job.submit", tenant=who.tenant) as change:
            who.check_role(Role.SUBMIT)
            spec = read_spec(request.spec_json)
            who.check_tenant(spec.tenant)
            change.tenant = spec.tenant
            job = await self._desk.submit(
                spec, request_id=request.request_id, files=dict(request.files)
            )
            change.target = job.status.job_id
        return wire.job_to(job)

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> types_pb2.Job:
        """One job."""
        await self._check(request.job_id, context)
        return wire.job_to(await self._jobs.get(request.job_id))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsReply:
        """A page of jobs, newest first."""
        tenant = caller(context).narrowed(request.tenant)
        if tenant is None:
            return pb.ListJobsReply()
        page = await self._jobs.list_page(
            tenant=tenant,
            states=request.states,
            page_size=request.page_size,
            page_token=request.page_token,
        )
        listed = [types_pb2.Job(status=wire.status_to(job.status)) for job in page.jobs]
        return pb.ListJobsReply(jobs=listed, next_page_token=page.token)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> types_pb2.Job:
        """Ask a job to end."""
        who, job_id = caller(context), request.job_id
        async with self._audit.change(
            who, "job.cancel", tenant=who.tenant, target=job_id
        ) as change:
            who.check_role(Role.SUBMIT)
            change.tenant = await self._check(job_id, context)
            return wire.job_to(await self._desk.cancel(job_id, reason=request.reason))

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: Any
    ) -> AsyncIterator[pb.JobEvent]:
        """The state now, then every change, until the job ends."""
        await self._check(request.job_id, context)
        async for event in self._desk.watch(request.job_id, after=request.after_metric):
            yield pb.JobEvent(
                status=wire.status_to(event.status),
                metrics=_rows(event.rows),
                live_json=json.dumps(event.live),
            )

    async def ListMetrics(
        self, request: pb.ListMetricsRequest, context: Any
    ) -> pb.ListMetricsReply:
        """Rows of a job's history."""
        await self._check(request.job_id, context)
        rows, more = await self._desk.rows(
            request.job_id, after=request.after, page_size=request.page_size
        )
        return pb.ListMetricsReply(rows=_rows(rows), next=more)

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest, context: Any
    ) -> pb.ListTrajectoriesReply:
        """A page of trajectories, newest first."""
        await self._check(request.job_id, context)
        ledger = await self._ledgers.get(request.job_id)
        found, token = await ledger.trajectories.page(
            purpose=request.purpose or "train",
            page_size=max(1, min(request.page_size or 20, 200)),
            page_token=request.page_token,
        )
        trajectories = map(wire.trajectory_to, found)
        return pb.ListTrajectoriesReply(trajectories=trajectories, next_page_token=token)

    async def AuditJob(self, request: pb.AuditJobRequest, context: Any) -> pb.AuditReport:
        """Whether the books are right."""
        await self._check(request.job_id, context)
        report = await (await self._ledgers.get(request.job_id)).audit()
        return pb.AuditReport(
            job_id=report.job_id,
            ok=report.ok,
            counts=report.counts,
            dropped=report.dropped,
            problems=report.problems,
        )

    async def ListWeights(
        self, request: roster_pb2.ListWeightsRequest, context: Any
    ) -> roster_pb2.ListWeightsReply:
        """Who has which weights; of a job that is over nobody."""
        await self._check(request.job_id, context)
        await self._jobs.get(request.job_id)
        return holdings_to(self._tracker.holdings(request.job_id))

    async def _check(self, job_id: str, context: Any) -> str:
        """The tenant of a job.

        Raises:
            NotFoundError: there is none, or none that the caller may see.
        """
        tenant = await self._jobs.tenant_of(job_id)
        if not caller(context).sees(tenant):
            raise unknown_job(job_id)
        return tenant


def _rows(rows: Iterable[Row]) -> list[pb.MetricRow]:
    return [
        pb.MetricRow(
            index=row.index, step=row.step, kind=row.kind, values_json=json.dumps(row.values)
        )
        for row in rows
    ]
