"""The job API over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import jobs_pb2_grpc, types_pb2
from paceline.v1.roster_pb2 import ListWeightsReply, ListWeightsRequest
from paceline_gateway.jobs import Desk


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """Hands every call to the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Any) -> types_pb2.Job:
        """Check a job and start it."""
        return await self._desk.submit(request)

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> types_pb2.Job:
        """One job."""
        return await self._desk.get(request)

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsReply:
        """A page of jobs."""
        return await self._desk.list_jobs(request)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> types_pb2.Job:
        """Ask a job to end."""
        return await self._desk.cancel(request)

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: Any
    ) -> AsyncIterator[pb.JobEvent]:
        """The state now, then every change, until the job ends."""
        async for event in self._desk.watch(request):
            yield event

    async def ListMetrics(
        self, request: pb.ListMetricsRequest, context: Any
    ) -> pb.ListMetricsReply:
        """Metric rows so far."""
        return await self._desk.metrics(request)

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest, context: Any
    ) -> pb.ListTrajectoriesReply:
        """A page of trajectories."""
        return await self._desk.trajectories(request)

    async def AuditJob(self, request: pb.AuditJobRequest, context: Any) -> pb.AuditReport:
        """Whether the ledger's identity holds."""
        return await self._desk.audit(request)

    async def ListWeights(self, request: ListWeightsRequest, context: Any) -> ListWeightsReply:
        """Who has which weights."""
        return await self._desk.weights(request)
