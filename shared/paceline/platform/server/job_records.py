"""Reads the record of a job from experience."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.platform.transport.rpc import call
from paceline.v1 import jobs_pb2

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The parts of a job that workers need; they never change."""

    spec: str  # JSON, for `paceline.config.job_of`
    artifacts: dict[str, str]  # model files: name -> sha256
    unlisted: tuple[
        str, ...
    ]  # functions that it may name although the operator has not listed them


async def fetch_job(jobs: JobsAsyncStub, job_id: str, *, timeout_s: float) -> JobRecord:
    """The record of a job; retried until `timeout_s` have passed.

    Raises:
        NotFoundError: there is no such job.
        PacelineError: experience cannot be reached.
    """
    request = jobs_pb2.GetJobRequest(job_id=job_id)
    job = await call(jobs.GetJob, request, timeout_s=timeout_s, idempotent=True)
    return JobRecord(job.spec_json, dict(job.artifacts), tuple(job.status.unlisted))
