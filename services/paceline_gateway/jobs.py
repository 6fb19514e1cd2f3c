"""What REST and gRPC both call: validates jobs and forwards to the experience service.

Every call says on whose behalf; the experience service shows to each what is of their tenant.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.access import ALL_TENANTS, Principal
from paceline.config import JobSpec, parse_job
from paceline.config.documents import read_json, read_yaml
from paceline.config.quota import MAX_SPEC_BYTES
from paceline.errors import (
    DeadlineError,
    InvalidError,
    PermissionDeniedError,
    UnavailableError,
)
from paceline.logs import Log
from paceline.rpc import backoff_s, call, stream
from paceline.types import JobState
from paceline.usage import Usage, nowhere
from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import types_pb2
from paceline.v1.roster_pb2 import ListWeightsReply, ListWeightsRequest
from paceline_gateway.checks import check_files, check_plugins, read_model
from paceline_gateway.messages import checked
from paceline_gateway.patterns import Patterns
from paceline_gateway.readiness import plainly
from paceline_gateway.refusals import Refusal

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

log = Log("jobs")
WATCH_S = 3600.0


class Desk:
    """Everything a user can ask for. Messages in, messages out: most of them pass through."""

    def __init__(
        self,
        *,
        jobs: JobsAsyncStub,
        refused: Callable[[Refusal], None],
        timeout_s: float = 10.0,
        outage_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        usage: Usage | None = None,
    ) -> None:
        """`refused` is told of jobs for another tenant."""
        self._waits_on = nowhere if usage is None else usage.wait
        self._jobs = jobs
        self._refused = refused
        self._timeout_s = timeout_s
        self._outage_s = outage_s
        self._clock = clock
        self._patterns = Patterns()

    async def submit(self, request: pb.SubmitJobRequest, who: Principal) -> types_pb2.Job:
        """Check a job and hand it over with the small files of its model.

        Raises:
            ConfigError: the job is wrong; the message names the field.
            PermissionDeniedError: it is for another tenant.
        """
        raw = await asyncio.to_thread(decode, request.spec_json, yaml_too=False)
        return await self.submit_read(raw, request, who)

    async def submit_read(
        self, raw: Any, request: pb.SubmitJobRequest, who: Principal
    ) -> types_pb2.Job:
        """As `submit`, of a job file that has been read: what it says is `raw`."""
        checked(request)
        spec = self._owned(parse_job(raw), who)
        await check_plugins(spec, self._patterns, who.tenant)
        if request.files:
            files = await asyncio.to_thread(check_files, request.files, where="files")
        else:
            files = await asyncio.to_thread(read_model, Path(spec.model.path))
        whole = pb.SubmitJobRequest(
            spec_json=spec.model_dump_json(),
            # Without one of the user's own, it still makes our retries harmless.
            request_id=request.request_id or uuid.uuid4().hex,
            files=files,
        )
        job = await self._call(self._jobs.SubmitJob, whole, who)
        log.info("submitted", job=job.status.job_id, name=spec.name, tenant=spec.tenant)
        return job

    async def get(self, request: pb.GetJobRequest, who: Principal) -> types_pb2.Job:
        """One job."""
        return await self._call(self._jobs.GetJob, request, who)

    async def list_jobs(self, request: pb.ListJobsRequest, who: Principal) -> pb.ListJobsReply:
        """A page of jobs."""
        return await self._call(self._jobs.ListJobs, request, who)

    async def cancel(self, request: pb.CancelJobRequest, who: Principal) -> types_pb2.Job:
        """Ask a job to end."""
        job = await self._call(self._jobs.CancelJob, request, who)
        log.info("cancelled", job=request.job_id, reason=request.reason)
        return job

    async def metrics(self, request: pb.ListMetricsRequest, who: Principal) -> pb.ListMetricsReply:
        """Metric rows so far."""
        return await self._call(self._jobs.ListMetrics, request, who)

    async def trajectories(
        self, request: pb.ListTrajectoriesRequest, who: Principal
    ) -> pb.ListTrajectoriesReply:
        """A page of trajectories."""
        return await self._call(self._jobs.ListTrajectories, request, who)

    async def audit(self, request: pb.AuditJobRequest, who: Principal) -> pb.AuditReport:
        """Whether the ledger's identity holds."""
        return await self._call(self._jobs.AuditJob, request, who)

    async def weights(self, request: ListWeightsRequest, who: Principal) -> ListWeightsReply:
        """Who has which weights, and from whom."""
        return await self._call(self._jobs.ListWeights, request, who)

    async def watch(
        self, request: pb.WatchJobRequest, who: Principal
    ) -> AsyncIterator[pb.JobEvent]:
        """The state now and every change until the job ends, over outages of the upstream."""
        seen, state = checked(request).after_metric, ""
        attempt = 0
        lost_at: float | None = None
        while not state or not JobState(state).terminal:
            try:
                again = pb.WatchJobRequest(job_id=request.job_id, after_metric=seen)
                events = stream(self._jobs.WatchJob, again, timeout_s=WATCH_S, on_behalf_of=who)
                with plainly():
                    async with aclosing(events):  # pyright: ignore[reportArgumentType]
                        async for event in events:
                            seen += len(event.metrics)
                            state = event.status.state
                            attempt, lost_at = 0, None
                            yield event
            except (UnavailableError, DeadlineError):
                lost_at = self._clock() if lost_at is None else lost_at
                if not state or self._clock() - lost_at > self._outage_s:
                    raise
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    def _owned(self, spec: JobSpec, who: Principal) -> JobSpec:
        """The job with its tenant: of who submits it, unless they may choose."""
        if who.tenant == ALL_TENANTS:
            return spec
        if spec.tenant == JobSpec.model_fields["tenant"].default:
            return spec.model_copy(update={"tenant": who.tenant})
        try:
            who.check_tenant(spec.tenant)
        except PermissionDeniedError:
            self._refused(Refusal(who, who.source, "job.submit", "tenant"))
            raise
        return spec

    async def _call(self, method: Any, request: Any, who: Principal) -> Any:
        with self._waits_on("experience"), plainly():
            return await call(
                method,
                checked(request),
                timeout_s=self._timeout_s,
                idempotent=True,
                on_behalf_of=who,
            )


def decode(text: str | bytes, *, yaml_too: bool) -> Any:
    """A JSON document, or with `yaml_too` a YAML one.

    Raises:
        InvalidError: it is neither, or too large.
    """
    if len(text.encode() if isinstance(text, str) else text) > MAX_SPEC_BYTES:
        raise too_large()
    return read_yaml(text, what="job") if yaml_too else read_json(text, what="job")


def too_large() -> InvalidError:
    """A job file above the limit."""
    return InvalidError(f"job: is too large; at most {MAX_SPEC_BYTES} bytes are allowed")
