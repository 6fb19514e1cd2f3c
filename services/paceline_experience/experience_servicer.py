"""The ledger over gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from paceline import wire
from paceline.callers import may_speak_for
from paceline.errors import InvalidError
from paceline.types import JobState, WorkerKind
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import experience_pb2_grpc, types_pb2
from paceline_experience.artefacts import Artefacts
from paceline_experience.desk import Desk
from paceline_experience.dispatch import Dispatcher, Handout, JobKey, Told
from paceline_experience.ledger import EpisodeKey
from paceline_experience.ledgers import Ledgers
from paceline_experience.shares import BatchShare
from paceline_experience.training import Training

MOST_ASSIGNMENTS = 64
MOST_LEASE_BYTES = 1 << 20
MOST_PART_BYTES = (2 << 20) - (64 << 10)


class ExperienceServicer(experience_pb2_grpc.ExperienceServicer):
    """What environment workers, trainers and the controller call."""

    def __init__(
        self,
        *,
        desk: Desk,
        ledgers: Ledgers,
        dispatcher: Dispatcher,
        training: Training,
        artefacts: Artefacts,
    ) -> None:
        self.num_submitted = 0  # trajectories, since the start
        self._desk = desk
        self._ledgers = ledgers
        self._dispatcher = dispatcher
        self._training = training
        self._artefacts = artefacts

    async def Lease(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.LeaseReply]:
        """Assignments for credits, both ways at once."""
        messages = (told_from(message) async for message in request_iterator)
        async for handout in self._dispatcher.serve(messages):
            for reply in lease_replies(handout):
                yield reply

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitReply:
        """Idempotent on (episode, attempt)."""
        ledger = await self._ledgers.get(request.job_id)
        self.num_submitted += len(request.trajectories)
        return pb.SubmitReply(outcomes=await ledger.submit(request.trajectories))

    async def GrantIncarnation(
        self, request: pb.GrantIncarnationRequest, context: Any
    ) -> pb.GrantIncarnationReply:
        """The number of the next start of a job's trainer."""
        number = await self._training.grant_incarnation(request.job_id)
        return pb.GrantIncarnationReply(incarnation=number)

    async def ReportFailure(
        self, request: pb.ReportFailureRequest, context: Any
    ) -> pb.ReportFailureReply:
        """A life of a job's trainer has ended badly."""
        ledger = await self._ledgers.get(request.job_id)
        failures, reason = await ledger.report_failure(
            incarnation=request.incarnation, reason=request.reason
        )
        return pb.ReportFailureReply(failures=failures, reason=reason)

    async def SetJobState(self, request: pb.SetJobStateRequest, context: Any) -> types_pb2.Job:
        """Move a job on."""
        state = state_from(request.state)
        if state is not JobState.FAILED:
            may_speak_for(WorkerKind.CONTROLLER)
        job = await self._desk.set_state(request.job_id, state, reason=request.reason)
        return wire.job_to(job)

    async def Demand(self, request: pb.DemandRequest, context: Any) -> pb.DemandReply:
        """What each live job waits for."""
        entries = list(self._ledgers.active.items())
        jobs = [demand_to(job_id, await entry.ledger.live()) for job_id, entry in entries]
        return pb.DemandReply(jobs=jobs)

    async def Rewind(self, request: pb.RewindRequest, context: Any) -> pb.RewindReply:
        """Where this incarnation starts."""
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
        """A step is trained."""
        step, stop = await self._training.commit(
            request.job_id,
            incarnation=request.incarnation,
            step=request.step,
            batch_id=request.batch_id,
            metrics=_metrics(request.metrics_json),
        )
        return pb.CommitStepReply(step=step, stop=stop)

    async def Checkpointed(
        self, request: pb.CheckpointedRequest, context: Any
    ) -> pb.CheckpointedReply:
        """A checkpoint is durable."""
        await self._training.checkpointed(
            request.job_id,
            incarnation=request.incarnation,
            step=request.step,
            path=request.path,
            kept=request.kept_steps,
        )
        return pb.CheckpointedReply()

    async def ReportTracking(
        self, request: pb.ReportTrackingRequest, context: Any
    ) -> pb.ReportTrackingReply:
        """How far a tracker of a job has come."""
        await self._desk.note_tracker(request.job_id, wire.tracker_from(request.tracker))
        return pb.ReportTrackingReply()

    async def GetArtefact(
        self, request: pb.GetArtefactRequest, context: Any
    ) -> AsyncIterator[pb.ArtefactChunk]:
        """A small file, in pieces."""
        async for data in self._artefacts.pieces(request.digest):
            yield pb.ArtefactChunk(data=data)


def told_from(message: pb.LeaseRequest) -> Told:
    """A worker's message."""
    return Told(
        worker_id=message.worker_id,
        credits=message.credits,
        eval_credits=message.eval_credits,
        progress=[wire.progress_from(p) for p in message.progress],
        renew=[_key_from(k) for k in message.renew],
        give_back=[_key_from(k) for k in message.give_back],
        environments=message.environments,
        holds_no_more=message.holds_no_more,
    )


def lease_replies(handout: Handout) -> Iterator[pb.LeaseReply]:
    """Few messages, none of them large."""
    reply = pb.LeaseReply(abort=[_key_to(k) for k in handout.abort])
    size = 0
    for assignment in handout.assignments:
        message = wire.assignment_to(assignment)
        num_bytes = message.ByteSize()
        full = len(reply.assignments) == MOST_ASSIGNMENTS or size + num_bytes > MOST_LEASE_BYTES
        if reply.assignments and full:
            yield reply
            reply, size = pb.LeaseReply(), 0
        reply.assignments.append(message)
        size += num_bytes
    yield reply


def batch_parts(share: BatchShare) -> Iterator[pb.BatchPart]:
    """The header with the first samples, then the others."""
    part = pb.BatchPart(
        batch_id=share.batch_id,
        step=share.step,
        total_sequences=share.total_sequences,
        total_tokens=share.total_tokens,
        num_samples=len(share.samples),
        stop=share.stop,
        stats_json=json.dumps(share.stats),
    )
    size = 0
    for data in share.samples:
        if size and size + len(data) > MOST_PART_BYTES:
            yield part
            part, size = pb.BatchPart(), 0
        part.samples.add().MergeFromString(data)
        size += len(data)
    yield part


def demand_to(job_id: str, live: dict[str, Any]) -> pb.JobDemand:
    """What a job waits for."""
    return pb.JobDemand(
        job_id=job_id,
        queued=live["counts"]["queued"],
        leased=live["counts"]["leased"],
        ready_groups=live["ready_groups"],
        headroom_groups=live["headroom_groups"],
        trainer_wait_s=live["waiting_s"],
        step=live["step"],
        accepted_groups=live["accepted_groups"],
        sampled_tokens=live["tokens_generated"] + live["eval_tokens"],
        measuring=bool(live["eval"]),
    )


def state_from(name: str) -> JobState:
    """A job state by name."""
    try:
        return JobState(name)
    except ValueError:
        allowed = ", ".join(JobState)
        raise InvalidError(f"state: {name!r} is no job state; allowed: {allowed}") from None


def _key_from(message: pb.EpisodeKey) -> JobKey:
    key = EpisodeKey(
        group_id=message.group_id,
        index=message.index,
        attempt=message.attempt,
        reason=message.reason,
        detail=message.detail,
    )
    return JobKey(message.job_id, key)


def _key_to(each: JobKey) -> pb.EpisodeKey:
    key = each.key
    return pb.EpisodeKey(
        job_id=each.job_id, group_id=key.group_id, index=key.index, attempt=key.attempt
    )


def _metrics(text: str) -> dict[str, Any]:
    """What a trainer has measured; its numbers need not be finite.

    Raises:
        InvalidError: it is no object of JSON.
    """
    try:
        return dict(json.loads(text or "{}"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidError(f"metrics_json: not an object of JSON: {error}") from None
