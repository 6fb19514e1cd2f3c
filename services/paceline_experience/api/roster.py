"""The roster and the weight routes over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from paceline.enums import WorkerKind
from paceline.platform import wire
from paceline.platform.transport.job_credential import JOB_KINDS
from paceline.platform.transport.rpc_authorization import check_speaks_for
from paceline.types import WeightRefusal, Worker, WorkerPhase
from paceline.v1 import roster_pb2 as pb
from paceline.v1 import roster_pb2_grpc, types_pb2
from paceline.weights.route import ChunkSource, TransferProgress, TransferReport
from paceline_experience.fleet.roster import Query, Roster
from paceline_experience.fleet.routes import RoutePlanner
from paceline_experience.jobs.training import MAX_REASON_CHARS, Training


class RosterServicer(roster_pb2_grpc.RosterServicer):
    """Called by every process."""

    def __init__(
        self,
        *,
        roster: Roster,
        tracker: RoutePlanner,
        training: Training,
        ended_jobs: Callable[[Iterable[str]], Awaitable[Iterable[str]]],
    ) -> None:
        """`ended_jobs` returns jobs that have ended lately, and those given that have ended."""
        self._roster = roster
        self._tracker = tracker
        self._training = training
        self._ended_jobs = ended_jobs

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        """Join the roster."""
        worker = wire.from_proto(request.worker, Worker)
        check_speaks_for(worker.kind)
        self._check(worker.worker_id)
        self._roster.join(worker)
        return pb.JoinReply(lease_s=self._roster.lease_s)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        """Stay in the roster."""
        self._check(request.worker_id)
        member = self._roster.beat(
            request.worker_id,
            active_version=request.active_version,
            load=request.load,
            transfers=[wire.from_proto(each, TransferProgress) for each in request.transfers],
            usage=request.usage,
            phases=[wire.from_proto(each, WorkerPhase) for each in request.phases],
            refusal=_refusal(request),
        )
        self._tracker.progress(member)
        if member.worker.kind in JOB_KINDS:  # which are not told of other jobs
            return pb.HeartbeatReply(
                at_fault=self._training.at_fault(member), fault=self._training.fault(member)
            )
        return pb.HeartbeatReply(ended_jobs=await self._ended_jobs(request.kept_jobs))

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        """Leave the roster."""
        self._check(request.worker_id)
        self._roster.leave(request.worker_id)
        return pb.LeaveReply()

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersReply:
        """Workers in the roster."""
        return _workers(self._roster.workers(_query(request)))

    async def WatchWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> AsyncIterator[pb.ListWorkersReply]:
        """Workers in the roster, at every change."""
        async for workers in self._roster.watch(_query(request)):
            yield _workers(workers)

    async def PublishVersion(
        self, request: pb.PublishVersionRequest, context: Any
    ) -> pb.PublishVersionReply:
        """A new version is being served."""
        # Rank 0 serves every chunk, whatever its own part is.
        seed = ChunkSource(request.weights_endpoint, request.part, request.parts)
        if seed.part == 0:
            seed = replace(seed, parts=1)
        published = await self._training.publish_version(
            request.job_id,
            incarnation=request.incarnation,
            step=request.step,
            parent=request.parent,
            num_bytes=request.num_bytes,
            seed=seed,
            digest=request.digest,
            number=request.known_version if request.HasField("known_version") else -1,
        )
        reply = pb.PublishVersionReply(
            version=wire.to_proto(published.version, types_pb2.PolicyVersion),
            key=published.key,
            chunk_bytes=published.chunk_bytes,
            source_endpoint=published.source,
        )
        if published.held >= 0:
            reply.held_version = published.held
        return reply

    async def WatchRoute(
        self, request: pb.WatchRouteRequest, context: Any
    ) -> AsyncIterator[pb.Route]:
        """The worker's route to the newest version, at every change."""
        async for route in self._tracker.watch(request.job_id, request.worker_id):
            yield wire.to_proto(route, pb.Route)

    async def ReportTransfer(
        self, request: pb.ReportTransferRequest, context: Any
    ) -> pb.ReportTransferReply:
        """A worker's report on a transfer."""
        self._tracker.report(request.job_id, wire.from_proto(request, TransferReport))
        return pb.ReportTransferReply()

    def _check(self, worker_id: str) -> None:
        """A caller may not replace a worker of another kind."""
        worker = self._roster.find(worker_id)
        if worker is not None:
            check_speaks_for(worker.kind)


def _refusal(request: pb.HeartbeatRequest) -> WeightRefusal | None:
    if not request.HasField("refusal"):
        return None
    return WeightRefusal(request.refusal.version, request.refusal.reason[:MAX_REASON_CHARS])


def _query(request: pb.ListWorkersRequest) -> Query:
    kind = wire.member_of(WorkerKind, request.kind, "kind") if request.kind else None
    return Query(job_id=request.job_id, kind=kind, site=request.site)


def _workers(workers: Iterable[Worker]) -> pb.ListWorkersReply:
    return pb.ListWorkersReply(workers=[wire.to_proto(each, types_pb2.Worker) for each in workers])
