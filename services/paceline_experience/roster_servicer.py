"""The roster and the weight routes over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from paceline import wire
from paceline.callers import may_speak_for
from paceline.types import Worker
from paceline.v1 import roster_pb2 as pb
from paceline.v1 import roster_pb2_grpc
from paceline.weights.route import Source
from paceline.weights.wire import part_of, progress_from, report_from, route_to
from paceline_experience.roster import Query, Roster
from paceline_experience.routes import Tracker
from paceline_experience.training import Training


class RosterServicer(roster_pb2_grpc.RosterServicer):
    """What every process calls."""

    def __init__(
        self,
        *,
        roster: Roster,
        tracker: Tracker,
        training: Training,
        live_jobs: Callable[[], Iterable[str]],
    ) -> None:
        self._roster = roster
        self._tracker = tracker
        self._training = training
        self._live_jobs = live_jobs

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        """Enter the roster."""
        worker = wire.worker_from(request.worker)
        may_speak_for(worker.kind)
        self._check(worker.worker_id)
        self._roster.join(worker)
        return pb.JoinReply(lease_s=self._roster.lease_s)

    async def Beat(self, request: pb.BeatRequest, context: Any) -> pb.BeatReply:
        """Stay in the roster."""
        self._check(request.worker_id)
        member = self._roster.beat(
            request.worker_id,
            active_version=request.active_version,
            load=request.load,
            transfers=[progress_from(each) for each in request.transfers],
        )
        self._tracker.progress(member)
        return pb.BeatReply(live_jobs=self._live_jobs())

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        """Leave the roster."""
        self._check(request.worker_id)
        self._roster.leave(request.worker_id)
        return pb.LeaveReply()

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersReply:
        """Who is there."""
        return _workers(self._roster.workers(_query(request)))

    async def WatchWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> AsyncIterator[pb.ListWorkersReply]:
        """Who is there, at every change."""
        async for workers in self._roster.watch(_query(request)):
            yield _workers(workers)

    async def Announce(self, request: pb.AnnounceRequest, context: Any) -> pb.AnnounceReply:
        """A new version is being served."""
        part, parts = part_of(request.part, request.parts)
        # Rank 0 answers for every chunk, whatever part it is asked for first.
        seed = Source(request.weights_endpoint, part, parts if part else 1)
        made = await self._training.announce(
            request.job_id,
            incarnation=request.incarnation,
            step=request.step,
            parent=request.parent,
            num_bytes=request.num_bytes,
            seed=seed,
            digest=request.digest,
            number=request.known_version if request.HasField("known_version") else -1,
        )
        reply = pb.AnnounceReply(
            version=wire.version_to(made.version),
            key=made.key,
            chunk_bytes=made.chunk_bytes,
            source_endpoint=made.source,
        )
        if made.held >= 0:
            reply.held_version = made.held
        return reply

    async def WatchRoute(
        self, request: pb.WatchRouteRequest, context: Any
    ) -> AsyncIterator[pb.Route]:
        """Where to pull the newest version from."""
        async for route in self._tracker.watch(request.job_id, request.worker_id):
            yield route_to(route)

    async def ReportTransfer(
        self, request: pb.ReportTransferRequest, context: Any
    ) -> pb.ReportTransferReply:
        """How a transfer goes."""
        self._tracker.report(request.job_id, report_from(request))
        return pb.ReportTransferReply()

    def _check(self, worker_id: str) -> None:
        """Nobody takes over the place of a worker of another kind."""
        kind = self._roster.kind_of(worker_id)
        if kind is not None:
            may_speak_for(kind)


def _query(request: pb.ListWorkersRequest) -> Query:
    return Query(job_id=request.job_id, kind=request.kind, site=request.site)


def _workers(workers: Iterable[Worker]) -> pb.ListWorkersReply:
    return pb.ListWorkersReply(workers=map(wire.worker_to, workers))
