"""Reads the record of a job from experience."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import wire
from paceline.transport.rpc import call
from paceline.types import Job
from paceline.v1 import jobs_pb2

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub


async def fetch_job(jobs: JobsAsyncStub, job_id: str, *, timeout_s: float) -> Job:
    """A job with its spec and its model files; retried until `timeout_s` have passed.

    Raises:
        NotFoundError: there is no such job.
        PacelineError: experience cannot be reached.
    """
    request = jobs_pb2.GetJobRequest(job_id=job_id)
    reply = await call(jobs.GetJob, request, timeout_s=timeout_s, idempotent=True)
    return wire.from_proto(reply, Job)
