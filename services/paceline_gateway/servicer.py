"""The API over gRPC. Methods are given a message and who calls: see `guard.GrpcGuard`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from paceline.access import Principal
from paceline.v1 import access_pb2, tenants_pb2, types_pb2
from paceline.v1 import jobs_pb2 as pb
from paceline.v1.roster_pb2 import ListWeightsReply, ListWeightsRequest
from paceline_gateway.administration import Administration
from paceline_gateway.jobs import Desk


class JobsServicer:
    """Hands every call to the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def SubmitJob(self, request: pb.SubmitJobRequest, who: Principal) -> types_pb2.Job:
        """Check a job and start it."""
        return await self._desk.submit(request, who)

    async def GetJob(self, request: pb.GetJobRequest, who: Principal) -> types_pb2.Job:
        """One job."""
        return await self._desk.get(request, who)

    async def ListJobs(self, request: pb.ListJobsRequest, who: Principal) -> pb.ListJobsReply:
        """A page of jobs."""
        return await self._desk.list_jobs(request, who)

    async def CancelJob(self, request: pb.CancelJobRequest, who: Principal) -> types_pb2.Job:
        """Ask a job to end."""
        return await self._desk.cancel(request, who)

    async def WatchJob(
        self, request: pb.WatchJobRequest, who: Principal
    ) -> AsyncIterator[pb.JobEvent]:
        """The state now, then every change, until the job ends."""
        async for event in self._desk.watch(request, who):
            yield event

    async def ListMetrics(
        self, request: pb.ListMetricsRequest, who: Principal
    ) -> pb.ListMetricsReply:
        """Metric rows so far."""
        return await self._desk.metrics(request, who)

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest, who: Principal
    ) -> pb.ListTrajectoriesReply:
        """A page of trajectories."""
        return await self._desk.trajectories(request, who)

    async def AuditJob(self, request: pb.AuditJobRequest, who: Principal) -> pb.AuditReport:
        """Whether the ledger's identity holds."""
        return await self._desk.audit(request, who)

    async def ListWeights(self, request: ListWeightsRequest, who: Principal) -> ListWeightsReply:
        """Who has which weights."""
        return await self._desk.weights(request, who)


class AccessServicer:
    """Hands every call to the administration."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    async def CreateToken(
        self, request: access_pb2.CreateTokenRequest, who: Principal
    ) -> access_pb2.CreateTokenReply:
        """The only answer with the token itself."""
        return await self._administration.create_token(request, who)

    async def ListTokens(
        self, request: access_pb2.ListTokensRequest, who: Principal
    ) -> access_pb2.ListTokensReply:
        """Those that the caller may see."""
        return await self._administration.list_tokens(request, who)

    async def RevokeToken(
        self, request: access_pb2.RevokeTokenRequest, who: Principal
    ) -> access_pb2.Token:
        """From now on it opens nothing."""
        return await self._administration.revoke_token(request, who)

    async def ListAudit(
        self, request: access_pb2.ListAuditRequest, who: Principal
    ) -> access_pb2.ListAuditReply:
        """A page of the audit log."""
        return await self._administration.audit_log(request, who)


class TenantsServicer:
    """Hands every call to the administration."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    async def ListTenants(
        self, request: tenants_pb2.ListTenantsRequest, who: Principal
    ) -> tenants_pb2.ListTenantsReply:
        """Quotas and use, of those that the caller may see."""
        return await self._administration.tenants(request, who)

    async def SetQuota(
        self, request: tenants_pb2.SetQuotaRequest, who: Principal
    ) -> tenants_pb2.Tenant:
        """Set or reset a quota."""
        return await self._administration.set_quota(request, who)
