"""Reads job histories from the experience service, and reports tracker status to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from paceline.enums import JobState, Purpose
from paceline.isolation.code.tokenizers.jobs import JobTokenizer, Tokenizers
from paceline.platform import wire
from paceline.platform.progress import LedgerProgress
from paceline.platform.server import artifacts
from paceline.platform.transport.rpc import call, stream
from paceline.types import Job, TrackerStatus, Trajectory, Worker
from paceline.v1 import experience_pb2, jobs_pb2, roster_pb2, types_pb2

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

LIVE = [wire.number_of(state) for state in JobState if not state.terminal]
ROWS = 100
_TIMEOUT_S = 10.0
# An index past all rows, so that the first event of a watch has none.
_NO_ROWS = 1 << 40


@dataclass(frozen=True, slots=True)
class TrackedRow:
    """One row of a job's history."""

    index: int
    step: int
    kind: Purpose
    values: dict[str, Any]


class HistoryReader(Protocol):
    """The calls that feeds make to the experience service."""

    async def jobs(self, *, live: bool) -> list[Job]:
        """All jobs, or those that are not over, without specs."""
        ...

    async def job(self, job_id: str) -> Job:
        """One job."""
        ...

    async def rows(self, job_id: str, *, after: int) -> Sequence[TrackedRow]:
        """Some rows from index `after` on."""
        ...

    async def live(self, job_id: str) -> LedgerProgress | None:
        """Counts and rates of a job at this moment; empty when it is over."""
        ...

    async def workers(self, job_id: str) -> Sequence[Worker]:
        """The job's own workers and those of the shared pools."""
        ...

    async def trajectories(self, job_id: str, count: int) -> Sequence[Trajectory]:
        """The newest that were made for training."""
        ...

    async def tokenizer(self, job: Job) -> JobTokenizer:
        """The tokenizer of the job's model."""
        ...

    async def forget(self, job_id: str) -> None:
        """The job is not tracked any more: end what its tokenizer runs in."""
        ...

    async def report(self, job_id: str, tracker: TrackerStatus) -> None:
        """Keep how far a tracker has come."""
        ...


class GrpcHistoryReader:
    """A `HistoryReader` over gRPC."""

    def __init__(
        self,
        *,
        jobs: JobsAsyncStub,
        experience: ExperienceAsyncStub,
        roster: RosterAsyncStub,
        tokenizers: Tokenizers,
    ) -> None:
        self._tokenizers = tokenizers
        self._jobs = jobs
        self._experience = experience
        self._roster = roster

    async def jobs(self, *, live: bool) -> list[Job]:
        """All jobs, or those that are not over."""
        found: list[Job] = []
        token = ""
        while True:
            request = jobs_pb2.ListJobsRequest(
                state=LIVE if live else [], page_size=1000, page_token=token
            )
            reply = await call(self._jobs.ListJobs, request, timeout_s=_TIMEOUT_S)
            found += [wire.from_proto(each, Job) for each in reply.jobs]
            token = reply.next_page_token
            if not token:
                return found

    async def job(self, job_id: str) -> Job:
        """One job."""
        request = jobs_pb2.GetJobRequest(job_id=job_id)
        return wire.from_proto(await call(self._jobs.GetJob, request, timeout_s=_TIMEOUT_S), Job)

    async def rows(self, job_id: str, *, after: int) -> Sequence[TrackedRow]:
        """At most `ROWS` rows from index `after` on."""
        request = jobs_pb2.ListMetricsRequest(job_id=job_id, after=after, page_size=ROWS)
        reply = await call(self._jobs.ListMetrics, request, timeout_s=_TIMEOUT_S)
        return [wire.from_proto(row, TrackedRow) for row in reply.rows]

    async def live(self, job_id: str) -> LedgerProgress | None:
        """Progress from the first event of a watch; None: the job has no open ledger."""
        request = jobs_pb2.WatchJobRequest(job_id=job_id, after_metric=_NO_ROWS)
        async for event in stream(self._jobs.WatchJob, request, timeout_s=_TIMEOUT_S):
            return wire.from_proto(event.live, LedgerProgress) if event.HasField("live") else None
        return None

    async def workers(self, job_id: str) -> Sequence[Worker]:
        """The job's own workers and those of the shared pools."""
        request = roster_pb2.ListWorkersRequest(job_id=job_id)
        reply = await call(self._roster.ListWorkers, request, timeout_s=_TIMEOUT_S)
        return [wire.from_proto(worker, Worker) for worker in reply.workers]

    async def trajectories(self, job_id: str, count: int) -> Sequence[Trajectory]:
        """The newest that were made for training."""
        request = jobs_pb2.ListTrajectoriesRequest(job_id=job_id, page_size=count)
        reply = await call(self._jobs.ListTrajectories, request, timeout_s=_TIMEOUT_S)
        return [wire.from_proto(each, Trajectory) for each in reply.trajectories]

    async def tokenizer(self, job: Job) -> JobTokenizer:
        """The tokenizer, from the small model files stored with the job."""
        return await self._tokenizers.of(job.status.job_id, partial(self._files, job))

    async def forget(self, job_id: str) -> None:
        """The job is not tracked any more: end what its tokenizer runs in."""
        await self._tokenizers.end(job_id)

    async def _files(self, job: Job) -> dict[str, bytes]:
        digests = job.artifacts.items()
        return {name: await artifacts.fetch(self._experience, digest) for name, digest in digests}

    async def report(self, job_id: str, tracker: TrackerStatus) -> None:
        """Keep how far a tracker has come."""
        request = experience_pb2.ReportTrackingRequest(
            job_id=job_id, tracker=wire.to_proto(tracker, types_pb2.TrackerStatus)
        )
        await call(self._experience.ReportTracking, request, timeout_s=_TIMEOUT_S, idempotent=True)
