"""An in-memory Jobs service, as the upstream in tests of its clients."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from paceline.config import parse_job
from paceline.enums import JobState, Purpose, TrackerState, check_job_transition
from paceline.errors import DeletedError, NotFoundError, PendingError, StateError
from paceline.isolation.code.archive import check
from paceline.platform import wire
from paceline.platform.digest import digest_of
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor
from paceline.platform.transport.sending import accept
from paceline.types import Job, JobStatus, TrackerStatus, Trajectory
from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import jobs_pb2_grpc, roster_pb2, types_pb2
from paceline.weights.placement import WeightPlacement


class JobsInMemory(jobs_pb2_grpc.JobsServicer):
    """Stores submitted jobs, which tests advance with `move` and `measure`."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.code: dict[str, bytes] = {}
        self.rows: dict[str, list[pb.MetricRow]] = {}
        self.holdings = WeightPlacement()
        self.trajectories: list[Trajectory] = []
        self.pending = 0  # submissions that are answered with `PendingError`
        self._requests: dict[str, str] = {}
        self._deleted: set[str] = set()
        self._numbers = itertools.count()
        self._changed = asyncio.Condition()

    async def move(self, job_id: str, *path: JobState) -> None:
        """Move a job through a sequence of states."""
        for state in path:
            await self._set(job_id, state)

    def delete(self, job_id: str) -> None:
        """Delete a job; its request is remembered."""
        del self.jobs[job_id]
        self._deleted.add(job_id)

    def lose(self, job_id: str) -> None:
        """Forget a job and its request, as a store that comes from an older backup."""
        del self.jobs[job_id]
        self._requests = {name: each for name, each in self._requests.items() if each != job_id}

    async def measure(self, job_id: str, **values: float) -> None:
        """Add a metric row."""
        rows = self.rows[job_id]
        at = len(rows)
        row = pb.MetricRow(
            index=at, step=at, kind=types_pb2.PURPOSE_TRAIN, values=wire.to_struct(values)
        )
        rows.append(row)
        async with self._changed:
            self._changed.notify_all()

    async def UploadCode(
        self, request_iterator: AsyncIterator[pb.UploadCodeRequest], context: Any
    ) -> pb.Code:
        """Store code."""
        await accept(context)
        archive = b"".join([each.archive async for each in request_iterator])
        digest = digest_of(archive)
        self.code[digest] = archive
        return pb.Code(digest=digest, num_files=len(check(BytesIO(archive))))

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Any) -> types_pb2.Job:
        """Store a job."""
        spec = parse_job(json.loads(request.spec_json))
        if self.pending:
            self.pending -= 1
            raise PendingError("fork: the checkpoint is being copied")
        if request.request_id not in self._requests:
            if spec.fork is not None:
                self._job(spec.fork.job)
            self._requests[request.request_id] = f"job-{next(self._numbers)}"
        job_id = self._requests[request.request_id]
        if job_id in self._deleted:
            raise DeletedError(f"job {job_id} was deleted")
        if job_id not in self.jobs:
            trackers = [TrackerStatus(t.label, t.kind, TrackerState.WAITING) for t in spec.tracking]
            status = JobStatus(
                job_id=job_id,
                name=spec.name,
                tenant=spec.tenant,
                state=JobState.QUEUED,
                tracking=tuple(trackers),
            )
            artifacts = dict.fromkeys(request.files, "0" * 64)
            self.jobs[job_id] = Job(status=status, spec=request.spec_json, artifacts=artifacts)
            self.files[job_id] = dict(request.files)
            self.rows[job_id] = []
        return wire.to_proto(self.jobs[job_id], types_pb2.Job)

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> types_pb2.Job:
        """One job."""
        return wire.to_proto(self._job(request.job_id), types_pb2.Job)

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsReply:
        """Jobs; the page token is a position."""
        wanted = [wire.member_of(JobState, each, "state") for each in request.state]
        found = [
            job
            for job in self.jobs.values()
            if request.tenant in ("", job.status.tenant)
            and (not wanted or job.status.state in wanted)
        ]
        start = int(request.page_token or 0)
        end = start + (request.page_size or 100)
        token = str(end) if end < len(found) else ""
        page = [
            wire.to_proto(Job(status=job.status, spec=""), types_pb2.Job)
            for job in found[start:end]
        ]
        return pb.ListJobsReply(jobs=page, next_page_token=token)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> types_pb2.Job:
        """Cancel a job."""
        state = self._job(request.job_id).status.state
        if state.terminal:
            raise StateError(f"job {request.job_id} has already {state}")
        await self._set(request.job_id, JobState.CANCELLING, reason=request.reason)
        return wire.to_proto(self._job(request.job_id), types_pb2.Job)

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: Any
    ) -> AsyncIterator[pb.JobEvent]:
        """Stream every change until the job ends."""
        seen = request.after_metric
        status: JobStatus | None = None
        while status is None or not status.state.terminal:
            job = self._job(request.job_id)
            rows = self.rows[request.job_id][seen:]
            if rows or job.status != status:
                status, seen = job.status, seen + len(rows)
                yield pb.JobEvent(
                    status=wire.to_proto(status, types_pb2.JobStatus),
                    metrics=rows,
                    live=pb.LedgerProgress(counts={"queued": 1}),
                )
                continue
            async with self._changed:
                await self._changed.wait()

    async def ListMetrics(
        self, request: pb.ListMetricsRequest, context: Any
    ) -> pb.ListMetricsReply:
        """Metric rows."""
        self._job(request.job_id)
        rows = self.rows[request.job_id]
        end = request.after + (request.page_size or 500)
        return pb.ListMetricsReply(
            rows=rows[request.after : end], next=end if end < len(rows) else 0
        )

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest, context: Any
    ) -> pb.ListTrajectoriesReply:
        """The trajectories that the test has set."""
        purpose = wire.member_of(Purpose, request.purpose or 1, "purpose")
        found = [each for each in self.trajectories if each.purpose == purpose]
        page = [
            wire.to_proto(each, types_pb2.Trajectory) for each in found[: request.page_size or 20]
        ]
        return pb.ListTrajectoriesReply(trajectories=page)

    async def VerifyJob(self, request: pb.VerifyJobRequest, context: Any) -> pb.VerificationReport:
        """Report an empty, consistent ledger."""
        self._job(request.job_id)
        return pb.VerificationReport(job_id=request.job_id, ok=True, counts={"admitted": 0})

    async def ListWeights(
        self, request: roster_pb2.ListWeightsRequest, context: Any
    ) -> roster_pb2.ListWeightsReply:
        """The contents of `holdings`, set by the test."""
        self._job(request.job_id)
        return wire.to_proto(self.holdings, roster_pb2.ListWeightsReply)

    def _job(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise NotFoundError(f"job {job_id!r} is not known")
        return self.jobs[job_id]

    async def _set(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        job = self._job(job_id)
        check_job_transition(job.status.state, state)
        self.jobs[job_id] = replace(job, status=replace(job.status, state=state, reason=reason))
        async with self._changed:
            self._changed.notify_all()


def jobs_in_memory() -> JobsInMemory:
    """One without jobs; calls that no test makes are not implemented."""
    return JobsInMemory()  # pyright: ignore[reportAbstractUsage]


async def serve_jobs(
    jobs: JobsInMemory, *, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> tuple[aio.Server, int]:
    """Serve on loopback with Paceline's error mapping; returns the server and its port."""
    interceptors = [ErrorInterceptor(metrics=Metrics())]
    server = aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    jobs_pb2_grpc.add_JobsServicer_to_server(jobs, server)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    wanted = f"127.0.0.1:{port}"
    if credentials is None:
        port = server.add_insecure_port(wanted)
    else:
        port = server.add_secure_port(wanted, credentials)
    await server.start()
    return server, port
