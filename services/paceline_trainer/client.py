"""The trainer's client of experience: converts messages, retries until experience answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.enums import TRAINER_SAYS, StopReason
from paceline.errors import DeadlineError, UnavailableError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import backoff_s, call, stream
from paceline.types import Job, PolicyVersion, WorkerMismatch
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import jobs_pb2, roster_pb2, types_pb2
from paceline_trainer.columns import Share

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

CALL_TIMEOUT_S = 30.0
REPORT_TIMEOUT_S = 5.0
TAKE_TIMEOUT_S = 600.0
Reply = TypeVar("Reply")
log = Log("ledger")


@dataclass(frozen=True, slots=True)
class NumberedVersion:
    """A publication with the number that experience has assigned."""

    version: PolicyVersion
    held: int  # a version to keep serving; -1: none
    key: bytes = field(repr=False)
    chunk_bytes: int
    source: str  # endpoint of rank 0, which serves part 0


class TrainerLedger:
    """The ledger, for one incarnation of a job's trainer. Retries while it is unavailable."""

    def __init__(
        self,
        *,
        experience: ExperienceAsyncStub,
        roster: RosterAsyncStub,
        jobs: JobsAsyncStub,
        job_id: str,
        incarnation: int,
    ) -> None:
        self._experience = experience
        self._roster = roster
        self._jobs = jobs
        self.job_id = job_id
        self._incarnation = incarnation

    async def job(self) -> Job:
        """The job and its current state."""
        request = jobs_pb2.GetJobRequest(job_id=self.job_id)
        return wire.from_proto(await self._call("GetJob", self._jobs.GetJob, request), Job)

    async def rewind(self, step: int, *, reason: str = "") -> tuple[int, int]:
        """Rewind the ledger to a checkpointed step; returns the step and the newest version.

        The version is -1 if there is none. `reason` says why newer checkpoints are skipped.
        """
        request = pb.RewindRequest(
            job_id=self.job_id, incarnation=self._incarnation, step=step, reason=reason
        )
        reply = await self._call("Rewind", self._experience.Rewind, request)
        return reply.step, reply.parent_version

    async def take(self, step: int, *, rank: int, world: int) -> Share:
        """Wait for this rank's share of the batch of a step, or a word to publish again."""
        request = pb.TakeBatchRequest(
            job_id=self.job_id, incarnation=self._incarnation, step=step, rank=rank, world=world
        )
        return await _until_available("TakeBatch", lambda: self._take(request))

    async def commit(
        self,
        step: int,
        batch_id: str,
        metrics: Mapping[str, float],
        *,
        mismatches: Sequence[WorkerMismatch] = (),
    ) -> StopReason | None:
        """Commit the batch of `step`; returns why there is no further one, or None."""
        request = pb.CommitStepRequest(
            job_id=self.job_id,
            incarnation=self._incarnation,
            step=step,
            batch_id=batch_id,
            metrics=metrics,
            mismatches=[wire.to_proto(each, pb.WorkerMismatch) for each in mismatches],
        )
        reply = await self._call("CommitStep", self._experience.CommitStep, request)
        return wire.member_of(StopReason, reply.stop, "stop") if reply.stop else None

    async def checkpoints(self) -> dict[int, str]:
        """The checkpoints that the ledger knows: the SHA-256 of `paceline.json` by step."""
        request = pb.ListCheckpointsRequest(job_id=self.job_id, incarnation=self._incarnation)
        reply = await self._call("ListCheckpoints", self._experience.ListCheckpoints, request)
        return dict(reply.digests)

    async def commit_checkpoint(
        self, step: int, path: str, *, kept: Sequence[int], digest: str
    ) -> tuple[int, ...]:
        """Commit a checkpoint of `step`; `kept` are the steps that can be restored.

        Returns the steps of checkpoints that must stay beside the newest ones.
        """
        request = pb.CommitCheckpointRequest(
            job_id=self.job_id,
            incarnation=self._incarnation,
            step=step,
            path=path,
            kept_steps=kept,
            digest=digest,
        )
        method = self._experience.CommitCheckpoint
        reply = await self._call("CommitCheckpoint", method, request)
        return tuple(reply.retained_steps)

    async def publish_version(
        self,
        *,
        step: int,
        parent: int,
        endpoint: str,
        num_bytes: int,
        part: int,
        parts: int,
        digest: str = "",
        known: int = -1,
    ) -> NumberedVersion:
        """Publish the weights of a step, or announce one more seeder, which waits for part 0.

        `known` is the number that this publication already has (-1: none). It keeps the number
        even if the store has lost it.

        Raises:
            StateError: a later step is published, or another publication has that number.
        """
        request = roster_pb2.PublishVersionRequest(
            job_id=self.job_id,
            incarnation=self._incarnation,
            step=step,
            parent=parent,
            weights_endpoint=endpoint,
            num_bytes=num_bytes,
            part=part,
            parts=parts,
            digest=digest,
            known_version=known if known >= 0 else None,
        )
        reply = await self._call("PublishVersion", self._roster.PublishVersion, request)
        return NumberedVersion(
            version=wire.from_proto(reply.version, PolicyVersion),
            held=reply.held_version if reply.HasField("held_version") else -1,
            key=reply.key,
            chunk_bytes=reply.chunk_bytes,
            source=reply.source_endpoint,
        )

    async def fail(self, reason: str) -> None:
        """Fail the job for good, so that its trainer is not restarted."""
        request = pb.SetJobStateRequest(
            job_id=self.job_id, state=types_pb2.JOB_STATE_FAILED, reason=f"{TRAINER_SAYS}{reason}"
        )
        await call(self._experience.SetJobState, request, timeout_s=CALL_TIMEOUT_S, idempotent=True)

    async def report_failure(self, reason: str) -> None:
        """Report why this incarnation fails; the next one may succeed."""
        request = pb.ReportFailureRequest(
            job_id=self.job_id, incarnation=self._incarnation, reason=reason
        )
        await call(
            self._experience.ReportFailure, request, timeout_s=REPORT_TIMEOUT_S, idempotent=True
        )

    async def _call(self, name: str, method: Any, request: Any) -> Any:
        return await _until_available(name, lambda: call(method, request, timeout_s=CALL_TIMEOUT_S))

    async def _take(self, request: pb.TakeBatchRequest) -> Share:
        head: pb.BatchPart | None = None
        samples: list[pb.TrainSample] = []
        async for part in stream(self._experience.TakeBatch, request, timeout_s=TAKE_TIMEOUT_S):
            head = part if head is None else head
            samples.extend(part.samples)
        if head is None or (not head.stop and len(samples) != head.num_samples):
            raise UnavailableError(f"batch of step {request.step} is incomplete")
        return Share(
            batch_id=head.batch_id,
            step=head.step,
            total_sequences=head.total_sequences,
            total_tokens=head.total_tokens,
            samples=tuple(samples),
            stats=head.stats,
            stop=wire.member_of(StopReason, head.stop, "stop") if head.stop else None,
            age_steps=dict(head.age_steps),
            publish_again=head.publish_again,
            workers=tuple(head.workers),
        )


async def _until_available(name: str, attempt_call: Callable[[], Awaitable[Reply]]) -> Reply:
    """Retry a call, which must be idempotent, until experience answers."""
    attempt = 0
    while True:
        try:
            return await attempt_call()
        except (UnavailableError, DeadlineError) as error:
            log.warning("experience does not answer", call=name, error=error, attempt=attempt)
        await asyncio.sleep(backoff_s(attempt))
        attempt += 1
