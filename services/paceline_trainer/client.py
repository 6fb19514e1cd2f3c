"""The trainer's edge to experience: proto messages on one side, nouns and numbers on the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import wire
from paceline.errors import DeadlineError, UnavailableError
from paceline.logs import Log
from paceline.rpc import backoff_s, call, stream
from paceline.types import TRAINER_SAYS, Job, JobState, PolicyVersion
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import jobs_pb2, roster_pb2
from paceline_trainer.take import Share

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

CALL_S = 30.0
REPORT_S = 5.0
TAKE_S = 600.0
Answer = TypeVar("Answer")
log = Log("ledger")


@dataclass(frozen=True, slots=True)
class Announced:
    """A publication, as experience has numbered it."""

    version: PolicyVersion
    held: int  # a version to keep serving; -1: none
    key: bytes = field(repr=False)
    chunk_bytes: int
    source: str  # endpoint of part 0


class Ledger:
    """What one incarnation of a job's trainer asks of the ledger. It waits out absences."""

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
        """The job and its state now."""
        request = jobs_pb2.GetJobRequest(job_id=self.job_id)
        return wire.job_from(await self._call("GetJob", self._jobs.GetJob, request))

    async def rewind(self, step: int, *, reason: str = "") -> tuple[int, int]:
        """Start from a checkpointed step; the step and the last publication (-1: none).

        `reason` says why newer checkpoints are passed over.
        """
        request = pb.RewindRequest(
            job_id=self.job_id, incarnation=self._incarnation, step=step, reason=reason
        )
        reply = await self._call("Rewind", self._experience.Rewind, request)
        return reply.step, reply.parent_version

    async def take(self, step: int, *, rank: int, world: int) -> Share:
        """Wait for this rank's share of the batch of a step."""
        request = pb.TakeBatchRequest(
            job_id=self.job_id, incarnation=self._incarnation, step=step, rank=rank, world=world
        )
        return await _patiently("TakeBatch", lambda: self._take(request))

    async def commit(self, step: int, batch_id: str, metrics: dict[str, Any]) -> str:
        """Say that the batch of `step` is trained; why no further one will come, if so."""
        request = pb.CommitStepRequest(
            job_id=self.job_id,
            incarnation=self._incarnation,
            step=step,
            batch_id=batch_id,
            metrics_json=json.dumps(metrics),
        )
        return (await self._call("CommitStep", self._experience.CommitStep, request)).stop

    async def checkpointed(self, step: int, path: str, *, kept: Sequence[int]) -> None:
        """Say that everything up to `step` is durable, and which steps can be gone back to."""
        request = pb.CheckpointedRequest(
            job_id=self.job_id,
            incarnation=self._incarnation,
            step=step,
            path=path,
            kept_steps=kept,
        )
        await self._call("Checkpointed", self._experience.Checkpointed, request)

    async def announce(
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
    ) -> Announced:
        """Publish the weights of a step, or one more seed of them; part 0 is waited for.

        `known` is the number that this publication was given before (-1: none). It keeps it, even
        if the store has lost it since.

        Raises:
            StateError: a later step has been published, or another publication has that number.
        """
        request = roster_pb2.AnnounceRequest(
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
        reply = await self._call("Announce", self._roster.Announce, request)
        return Announced(
            version=wire.version_from(reply.version),
            held=reply.held_version if reply.HasField("held_version") else -1,
            key=reply.key,
            chunk_bytes=reply.chunk_bytes,
            source=reply.source_endpoint,
        )

    async def fail(self, reason: str) -> None:
        """This job can never be trained: end it, so that nobody starts its trainer again."""
        request = pb.SetJobStateRequest(
            job_id=self.job_id, state=JobState.FAILED, reason=f"{TRAINER_SAYS}{reason}"
        )
        await call(self._experience.SetJobState, request, timeout_s=CALL_S, idempotent=True)

    async def report_failure(self, reason: str) -> None:
        """This life ends badly; another one may fare better."""
        request = pb.ReportFailureRequest(
            job_id=self.job_id, incarnation=self._incarnation, reason=reason
        )
        await call(self._experience.ReportFailure, request, timeout_s=REPORT_S, idempotent=True)

    async def _call(self, name: str, method: Any, request: Any) -> Any:
        return await _patiently(name, lambda: call(method, request, timeout_s=CALL_S))

    async def _take(self, request: pb.TakeBatchRequest) -> Share:
        head: pb.BatchPart | None = None
        samples: list[pb.TrainSample] = []
        async for part in stream(self._experience.TakeBatch, request, timeout_s=TAKE_S):
            head = part if head is None else head
            samples.extend(part.samples)
        if head is None or (not head.stop and len(samples) != head.num_samples):
            raise UnavailableError(f"batch of step {request.step} came incomplete")
        return Share(
            batch_id=head.batch_id,
            step=head.step,
            total_sequences=head.total_sequences,
            total_tokens=head.total_tokens,
            samples=tuple(samples),
            stats=json.loads(head.stats_json or "{}"),
            stop=head.stop,
        )


async def _patiently(name: str, make: Callable[[], Awaitable[Answer]]) -> Answer:
    """Every call of the trainer is idempotent: repeat it until experience is back."""
    attempt = 0
    while True:
        try:
            return await make()
        except (UnavailableError, DeadlineError) as error:
            log.warning("experience does not answer", call=name, error=error, attempt=attempt)
        await asyncio.sleep(backoff_s(attempt))
        attempt += 1
