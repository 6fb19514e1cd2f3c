"""The ledger over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from paceline.enums import EpisodeOutcome, JobState, WorkerKind
from paceline.platform import wire
from paceline.platform.progress import LedgerProgress
from paceline.platform.transport.job_credential import JobCredential
from paceline.platform.transport.rpc_authorization import check_speaks_for
from paceline.types import EpisodeProgress, TrackerStatus, WorkerMismatch
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import experience_pb2_grpc, types_pb2
from paceline_experience.api.credentials import Credentials
from paceline_experience.dispatch.dispatch import Dispatcher, JobKey, LeaseDelta, WorkerReport
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.jobs.service import JobService
from paceline_experience.jobs.training import Training
from paceline_experience.ledger.ledger import EpisodeKey
from paceline_experience.ledger.shares import BatchShare
from paceline_experience.store.artifacts import ArtifactStore

MAX_ASSIGNMENTS = 64  # per LeaseReply
MAX_LEASE_BYTES = 1 << 20
MAX_PART_BYTES = (2 << 20) - (64 << 10)

_OUTCOMES = wire.numbers_of(EpisodeOutcome, pb.EpisodeOutcome.DESCRIPTOR)


class ExperienceServicer(experience_pb2_grpc.ExperienceServicer):
    """Called by environment workers, trainers and the controller."""

    def __init__(
        self,
        *,
        job_service: JobService,
        ledgers: Ledgers,
        dispatcher: Dispatcher,
        training: Training,
        artifacts: ArtifactStore,
        credentials: Credentials,
    ) -> None:
        self.num_submitted = 0  # trajectories, since the start
        self._job_service = job_service
        self._ledgers = ledgers
        self._dispatcher = dispatcher
        self._training = training
        self._artifacts = artifacts
        self._credentials = credentials

    async def Lease(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.LeaseReply]:
        """Assignments for credits, as a bidirectional stream."""
        messages = (report_from(message) async for message in request_iterator)
        async for delta in self._dispatcher.serve(messages):
            for reply in lease_replies(delta):
                yield reply

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitReply:
        """Submit trajectories; idempotent on (episode, attempt)."""
        ledger = await self._ledgers.get(request.job_id)
        self.num_submitted += len(request.trajectories)
        found = await ledger.submit(request.trajectories)
        await self._training.release_held(request.job_id, ledger)
        return pb.SubmitReply(outcomes=[_OUTCOMES[outcome] for outcome in found])

    async def GrantIncarnation(
        self, request: pb.GrantIncarnationRequest, context: Any
    ) -> pb.GrantIncarnationReply:
        """Number the next start of a job's trainer."""
        number = await self._training.grant_incarnation(request.job_id)
        return pb.GrantIncarnationReply(incarnation=number)

    async def IssueCredential(
        self, request: pb.IssueCredentialRequest, context: Any
    ) -> pb.IssueCredentialReply:
        """A credential for a worker that the controller is about to start."""
        credential = JobCredential(
            job_id=request.job_id,
            kind=wire.member_of(WorkerKind, request.kind, "kind"),
            worker=request.worker,
            incarnation=request.incarnation,
        )
        return pb.IssueCredentialReply(credential=await self._credentials.issue(credential))

    async def ReportFailure(
        self, request: pb.ReportFailureRequest, context: Any
    ) -> pb.ReportFailureReply:
        """An incarnation of a job's trainer has failed."""
        ledger = await self._ledgers.get(request.job_id)
        failures, reason = await ledger.report_failure(
            incarnation=request.incarnation, reason=request.reason
        )
        return pb.ReportFailureReply(failures=failures, reason=reason)

    async def SetJobState(self, request: pb.SetJobStateRequest, context: Any) -> types_pb2.Job:
        """Move a job to another state."""
        state = wire.member_of(JobState, request.state, "state")
        if state is not JobState.FAILED:
            check_speaks_for(WorkerKind.CONTROLLER)
        job = await self._job_service.set_state(request.job_id, state, reason=request.reason)
        return wire.to_proto(job, types_pb2.Job)

    async def Demand(self, request: pb.DemandRequest, context: Any) -> pb.DemandReply:
        """The demand of each live job."""
        entries = list(self._ledgers.active.items())
        jobs = [demand_to(job_id, await entry.ledger.live()) for job_id, entry in entries]
        return pb.DemandReply(jobs=jobs)

    async def Rewind(self, request: pb.RewindRequest, context: Any) -> pb.RewindReply:
        """Start an incarnation at a checkpoint."""
        step, parent = await self._training.rewind(
            request.job_id,
            incarnation=request.incarnation,
            step=request.step,
            reason=request.reason,
        )
        return pb.RewindReply(step=step, parent_version=parent)

    async def TakeBatch(
        self, request: pb.TakeBatchRequest, context: Any
    ) -> AsyncIterator[pb.BatchPart]:
        """The batch of a step, in parts."""
        share = await self._training.take(
            request.job_id,
            incarnation=request.incarnation,
            step=request.step,
            rank=request.rank,
            world=request.world,
        )
        for part in batch_parts(share):
            yield part

    async def CommitStep(self, request: pb.CommitStepRequest, context: Any) -> pb.CommitStepReply:
        """Commit a trained step."""
        step, stop = await self._training.commit(
            request.job_id,
            incarnation=request.incarnation,
            step=request.step,
            batch_id=request.batch_id,
            metrics=dict(request.metrics),
            mismatches=[wire.from_proto(each, WorkerMismatch) for each in request.mismatches],
        )
        return pb.CommitStepReply(step=step, stop=wire.number_of(stop))

    async def CommitCheckpoint(
        self, request: pb.CommitCheckpointRequest, context: Any
    ) -> pb.CommitCheckpointReply:
        """A checkpoint is durable."""
        stay = await self._training.commit_checkpoint(
            request.job_id,
            incarnation=request.incarnation,
            step=request.step,
            path=request.path,
            kept=request.kept_steps,
            digest=request.digest,
        )
        return pb.CommitCheckpointReply(retained_steps=stay)

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: Any
    ) -> pb.ListCheckpointsReply:
        """The checkpoints that a trainer may load."""
        found = await self._training.checkpoints(request.job_id, incarnation=request.incarnation)
        return pb.ListCheckpointsReply(digests=found)

    async def ReportTracking(
        self, request: pb.ReportTrackingRequest, context: Any
    ) -> pb.ReportTrackingReply:
        """Store the status of a tracker of a job."""
        await self._job_service.note_tracker(
            request.job_id, wire.from_proto(request.tracker, TrackerStatus)
        )
        return pb.ReportTrackingReply()

    async def GetArtifact(
        self, request: pb.GetArtifactRequest, context: Any
    ) -> AsyncIterator[pb.ArtifactChunk]:
        """A file, in chunks."""
        async for data in self._artifacts.chunks(request.digest, max(0, request.offset)):
            yield pb.ArtifactChunk(data=data)


def report_from(message: pb.LeaseRequest) -> WorkerReport:
    """Parse a worker's message."""
    return WorkerReport(
        worker_id=message.worker_id,
        credits=message.credits,
        eval_credits=message.eval_credits,
        progress=[wire.from_proto(p, EpisodeProgress) for p in message.progress],
        renew=[_key_from(k) for k in message.renew],
        give_back=[_key_from(k) for k in message.give_back],
        environments=message.environments,
        renew_is_complete=message.renew_is_complete,
    )


def lease_replies(delta: LeaseDelta) -> Iterator[pb.LeaseReply]:
    """Pack a delta into few messages of bounded size."""
    reply = pb.LeaseReply(abort=[_key_to(k) for k in delta.abort])
    size = 0
    for assignment in delta.assignments:
        message = wire.to_proto(assignment, types_pb2.Assignment)
        num_bytes = message.ByteSize()
        full = len(reply.assignments) == MAX_ASSIGNMENTS or size + num_bytes > MAX_LEASE_BYTES
        if reply.assignments and full:
            yield reply
            reply, size = pb.LeaseReply(), 0
        reply.assignments.append(message)
        size += num_bytes
    yield reply


def batch_parts(share: BatchShare) -> Iterator[pb.BatchPart]:
    """The header with the first samples, then the rest."""
    part = pb.BatchPart(
        batch_id=share.batch_id,
        step=share.step,
        total_sequences=share.total_sequences,
        total_tokens=share.total_tokens,
        num_samples=len(share.samples),
        stop=wire.number_of(share.stop),
        stats=wire.to_proto(share.stats, pb.BatchStats),
        age_steps=share.age_steps,
        publish_again=share.publish_again,
        workers=share.workers,
    )
    size = 0
    for data in share.samples:
        if size and size + len(data) > MAX_PART_BYTES:
            yield part
            part, size = pb.BatchPart(), 0
        part.samples.add().MergeFromString(data)
        size += len(data)
    yield part


def demand_to(job_id: str, live: LedgerProgress) -> pb.JobDemand:
    """The demand of a job as a message."""
    return pb.JobDemand(
        job_id=job_id,
        queued=live.counts["queued"],
        leased=live.counts["leased"],
        ready_groups=live.ready_groups,
        headroom_groups=live.headroom_groups,
        trainer_wait_s=live.waiting_s,
        step=live.step,
        accepted_groups=live.accepted_groups,
        sampled_tokens=live.tokens_generated + live.eval_tokens,
        measuring=live.eval is not None,
        group_size=live.group_size,
        failed_attempts=live.failed_attempts,
        last_failure=live.last_failure,
        filtered=live.filtered,
        eval_open=0 if live.eval is None else live.eval.open,
        eval_version=-1 if live.eval is None else live.eval.version,
        eval_tasks=0 if live.eval is None else live.eval.total,
        disagreement=live.disagreement,
    )


def _key_from(message: pb.EpisodeKey) -> JobKey:
    return JobKey(message.job_id, wire.from_proto(message, EpisodeKey))


def _key_to(each: JobKey) -> pb.EpisodeKey:
    message = wire.to_proto(each.key, pb.EpisodeKey)
    message.job_id = each.job_id
    return message
