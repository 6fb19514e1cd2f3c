"""The job API over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from paceline.enums import JobState, Purpose, ScoreStatus
from paceline.errors import InvalidError, NotFoundError
from paceline.front.api.episodes import NumberRange
from paceline.platform import wire
from paceline.platform.transport.operations import CODE_BYTES_KEY, bounded
from paceline.platform.transport.principal import Role, caller
from paceline.platform.transport.request_reader import timely
from paceline.platform.transport.sending import accept
from paceline.v1 import activity_pb2, episodes_pb2, jobs_pb2_grpc, roster_pb2, types_pb2
from paceline.v1 import jobs_pb2 as pb
from paceline_experience.fleet.routes import RoutePlanner
from paceline_experience.jobs.deletion import Deletion
from paceline_experience.jobs.history import JobMetricRow
from paceline_experience.jobs.jobs import JobStore, unknown_job
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.jobs.pausing import Pausing
from paceline_experience.jobs.record import read_spec
from paceline_experience.jobs.service import JobService
from paceline_experience.jobs.submit.uploads import CodePiece, Uploads
from paceline_experience.ledger.stored.listing import EpisodeQuery
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.tenancy.audit_log import AuditLog
from paceline_experience.usage.activity import ActivityMonitor
from paceline_experience.webhooks.outbox import Webhooks


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """Called by users through the gateway. Jobs of other tenants are reported as unknown."""

    def __init__(
        self,
        *,
        job_service: JobService,
        pausing: Pausing,
        uploads: Uploads,
        jobs: JobStore,
        ledgers: Ledgers,
        tracker: RoutePlanner,
        audit: AuditLog,
        deletion: Deletion,
        webhooks: Webhooks,
        artifacts: ArtifactStore,
        activity: ActivityMonitor,
    ) -> None:
        self._webhooks = webhooks
        self._deletion = deletion
        self._job_service = job_service
        self._pausing = pausing
        self._uploads = uploads
        self._jobs = jobs
        self._ledgers = ledgers
        self._tracker = tracker
        self._audit = audit
        self._artifacts = artifacts
        self._activity = activity

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Any) -> types_pb2.Job:
        """Submit a job; idempotent on (tenant, request_id)."""
        who = caller(context)
        async with self._audit.change(who, "job.submit", tenant=who.tenant) as change:
            who.check_role(Role.SUBMIT)
            spec = read_spec(request.spec_json)
            if spec.code is not None:
                who.check_code()
            who.check_tenant(spec.tenant)
            await asyncio.to_thread(self._webhooks.check, spec)
            change.tenant = spec.tenant
            job = await self._job_service.submit(
                spec, request_id=request.request_id, files=dict(request.files)
            )
            change.target = job.status.job_id
            # Of a request with the same id, the job is there already.
            change.repeated = self._audit.is_recent(who, "job.submit", change.target)
        return wire.to_proto(job, types_pb2.Job)

    async def UploadCode(
        self, request_iterator: AsyncIterator[pb.UploadCodeRequest], context: Any
    ) -> pb.Code:
        """Store code for jobs of the caller's tenant."""
        who = caller(context)
        async with self._audit.change(who, "code.upload", tenant=who.tenant) as change:
            who.check_role(Role.SUBMIT)
            who.check_code()
            pieces = (
                CodePiece(each.archive, each.digest, each.num_bytes)
                async for each in timely(request_iterator)
            )
            pairs = {str(key): value for key, value in context.invocation_metadata() or ()}
            code = await self._uploads.receive(
                who.tenant,
                pieces,
                num_bytes=int(pairs.get(CODE_BYTES_KEY, 0)),
                accept=lambda: accept(context),
            )
            change.target = code.digest
            change.repeated = self._audit.is_recent(who, "code.upload", change.target)
        return pb.Code(digest=code.digest, num_files=len(code.names))

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> types_pb2.Job:
        """One job."""
        await self._check(request.job_id, context)
        return wire.to_proto(await self._jobs.get(request.job_id), types_pb2.Job)

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsReply:
        """A page of jobs, newest first."""
        tenant = caller(context).narrowed(request.tenant)
        if tenant is None:
            return pb.ListJobsReply()
        page = await self._jobs.list_page(
            tenant=tenant,
            states=[wire.member_of(JobState, each, "state") for each in request.state],
            page_size=bounded(request, "page_size"),
            page_token=request.page_token,
        )
        listed = [
            types_pb2.Job(status=wire.to_proto(job.status, types_pb2.JobStatus))
            for job in page.jobs
        ]
        return pb.ListJobsReply(jobs=listed, next_page_token=page.token)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> types_pb2.Job:
        """Start to cancel a job."""
        async with self._change("job.cancel", request.job_id, context):
            job = await self._job_service.cancel(request.job_id, reason=request.reason)
        return wire.to_proto(job, types_pb2.Job)

    async def PauseJob(self, request: pb.PauseJobRequest, context: Any) -> types_pb2.Job:
        """Start to pause a job."""
        async with self._change("job.pause", request.job_id, context):
            job = await self._pausing.pause(request.job_id, reason=request.reason)
        return wire.to_proto(job, types_pb2.Job)

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> types_pb2.Job:
        """Queue a paused job again."""
        async with self._change("job.resume", request.job_id, context):
            job = await self._pausing.resume(request.job_id, reason=request.reason)
        return wire.to_proto(job, types_pb2.Job)

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Any) -> pb.DeleteJobReply:
        """Delete a job, or begin to."""
        job_id = request.job_id
        async with self._change("job.delete", job_id, context):
            deleted = await self._deletion.delete(job_id, force=request.force)
        return pb.DeleteJobReply(job_id=job_id, deleted=deleted)

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: Any
    ) -> AsyncIterator[pb.JobEvent]:
        """The present state, then every change, until the job ends."""
        await self._check(request.job_id, context)
        async for event in self._job_service.watch(request.job_id, after=request.after_metric):
            yield pb.JobEvent(
                status=wire.to_proto(event.status, types_pb2.JobStatus),
                metrics=_rows(event.rows),
                live=event.live and wire.to_proto(event.live, pb.LedgerProgress),
            )

    async def ListMetrics(
        self, request: pb.ListMetricsRequest, context: Any
    ) -> pb.ListMetricsReply:
        """Rows of a job's history."""
        await self._check(request.job_id, context)
        rows, more = await self._job_service.rows(
            request.job_id, after=request.after, page_size=bounded(request, "page_size")
        )
        return pb.ListMetricsReply(rows=_rows(rows), next=more)

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest, context: Any
    ) -> pb.ListTrajectoriesReply:
        """A page of trajectories, newest first."""
        await self._check(request.job_id, context)
        ledger = await self._ledgers.get(request.job_id)
        found, token = await ledger.trajectories.page(
            purpose=wire.member_of(Purpose, request.purpose, "purpose")
            if request.purpose
            else Purpose.TRAIN,
            page_size=bounded(request, "page_size"),
            page_token=request.page_token,
        )
        trajectories = [wire.to_proto(each, types_pb2.Trajectory) for each in found]
        return pb.ListTrajectoriesReply(trajectories=trajectories, next_page_token=token)

    async def ListEpisodes(
        self, request: episodes_pb2.ListEpisodesRequest, context: Any
    ) -> episodes_pb2.ListEpisodesReply:
        """A page of stored episodes, newest first."""
        query = _query(request)
        await self._check(request.job_id, context)
        ledger = await self._ledgers.get(request.job_id)
        found, token = await ledger.episodes.page(
            query, page_size=bounded(request, "page_size"), page_token=request.page_token
        )
        episodes = [wire.to_proto(each, episodes_pb2.Episode) for each in found]
        return episodes_pb2.ListEpisodesReply(episodes=episodes, next_page_token=token)

    async def GetModelFile(
        self, request: episodes_pb2.GetModelFileRequest, context: Any
    ) -> episodes_pb2.ModelFile:
        """A small file of a job's model; they are JSON or templates, so text."""
        await self._check(request.job_id, context)
        files = (await self._jobs.get(request.job_id)).artifacts
        if request.name not in files:
            raise NotFoundError(f"model file {request.name!r} is not known; there are {[*files]}")
        digest = files[request.name]
        data = bytearray()
        async for chunk in self._artifacts.chunks(digest):
            data += chunk
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise InvalidError(f"name: {request.name!r} is no text") from None
        return episodes_pb2.ModelFile(name=request.name, digest=digest, text=text)

    async def GetActivity(
        self, request: activity_pb2.GetActivityRequest, context: Any
    ) -> activity_pb2.Activity:
        """What jobs and processes are doing."""
        found = await self._activity.snapshot(caller(context), tenant=request.tenant)
        return wire.to_proto(found, activity_pb2.Activity)

    async def VerifyJob(self, request: pb.VerifyJobRequest, context: Any) -> pb.VerificationReport:
        """Verify a job's ledger."""
        await self._check(request.job_id, context)
        report = await (await self._ledgers.get(request.job_id)).verify()
        await self._jobs.get(request.job_id)  # of a job that was deleted meanwhile, parts are gone
        return pb.VerificationReport(
            job_id=report.job_id,
            ok=report.ok,
            counts=report.counts,
            dropped=report.dropped,
            problems=report.problems,
        )

    async def ImportEpisodes(
        self, request: pb.ImportEpisodesRequest, context: Any
    ) -> pb.ImportEpisodesReply:
        """Store trajectories in a job's replay."""
        who, job_id = caller(context), request.job_id
        async with self._audit.change(
            who, "job.import", tenant=who.tenant, target=job_id
        ) as change:
            who.check_role(Role.SUBMIT)
            change.tenant = await self._check(job_id, context)
            report = await self._job_service.import_episodes(job_id, request.lines)
        return wire.to_proto(report, pb.ImportEpisodesReply)

    async def ListWeights(
        self, request: roster_pb2.ListWeightsRequest, context: Any
    ) -> roster_pb2.ListWeightsReply:
        """Which workers hold which weights; empty for a job that is over."""
        await self._check(request.job_id, context)
        await self._jobs.get(request.job_id)
        return wire.to_proto(self._tracker.placement(request.job_id), roster_pb2.ListWeightsReply)

    @asynccontextmanager
    async def _change(self, action: str, job_id: str, context: Any) -> AsyncGenerator[None]:
        """An audited change of a job that the caller may change."""
        who = caller(context)
        async with self._audit.change(who, action, tenant=who.tenant, target=job_id) as change:
            who.check_role(Role.SUBMIT)
            change.tenant = await self._check(job_id, context)
            before = await self._asked(job_id)
            yield
            change.repeated = await self._asked(job_id) == before

    async def _asked(self, job_id: str) -> tuple[JobState | None, str, bool]:
        """State and reason of a job, unless it is to be deleted: what users may change of it."""
        try:
            if await self._jobs.registry.mark_of(job_id) is not None:
                return None, "", True
            status = (await self._jobs.get(job_id)).status
        except NotFoundError:  # deleted meanwhile
            return None, "", True
        return status.state, status.reason, False

    async def _check(self, job_id: str, context: Any) -> str:
        """The tenant of a job.

        Raises:
            NotFoundError: there is no such job, or the caller may not see it.
        """
        tenant = await self._jobs.tenant_of(job_id)
        if not caller(context).sees(tenant):
            raise unknown_job(job_id)
        return tenant


def _query(request: episodes_pb2.ListEpisodesRequest) -> EpisodeQuery:
    """What is asked for.

    Raises:
        InvalidError: a range is malformed.
    """
    purpose, status = request.purpose, request.status
    return EpisodeQuery(
        purpose=wire.member_of(Purpose, purpose, "purpose") if purpose else Purpose.TRAIN,
        group_id=request.group_id,
        task_id=request.task_id,
        reward=NumberRange.parse(request.reward, name="reward"),
        step=NumberRange.parse(request.step, name="step"),
        age=NumberRange.parse(request.age, name="age"),
        status=wire.member_of(ScoreStatus, status, "status") if status else None,
        failed=request.failed,
        dropped=request.dropped,
        trajectories=request.trajectories,
    )


def _rows(rows: Iterable[JobMetricRow]) -> list[pb.MetricRow]:
    return [wire.to_proto(row, pb.MetricRow) for row in rows]
