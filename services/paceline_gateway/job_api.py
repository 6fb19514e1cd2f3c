"""What the gateway does itself: checks jobs before submitting them, and resumes watches."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from paceline import wire
from paceline.config import JobSpec, resolve_job
from paceline.config.documents import read_json, read_yaml
from paceline.config.precision import Dtype
from paceline.config.quota import MAX_SPEC_BYTES
from paceline.enums import JobState
from paceline.errors import (
    DeadlineError,
    InvalidError,
    PermissionDeniedError,
    UnavailableError,
)
from paceline.telemetry.logs import Log
from paceline.transport.operations import operation
from paceline.transport.principal import ALL_TENANTS, Principal
from paceline.transport.rpc import backoff_s
from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import types_pb2
from paceline_gateway.access.refusals import Refusal
from paceline_gateway.messages import checked
from paceline_gateway.submit.checks import check_code, check_files, check_plugins, read_model
from paceline_gateway.submit.patterns import Patterns
from paceline_gateway.submit.trial import ModelTrial
from paceline_gateway.upstream import Upstream

log = Log("jobs")
SUBMIT = operation("Jobs", "SubmitJob")
UPLOAD = operation("Jobs", "UploadCode")
WATCH = operation("Jobs", "WatchJob")
SUBMIT_S = 60.0  # plug-ins are tried, and tasks of a job's own code are listed


class JobApi:
    """Submits and watches jobs for users. Messages in, messages out."""

    def __init__(
        self,
        *,
        upstream: Upstream,
        on_refusal: Callable[[Refusal], None],
        trial: ModelTrial,
        dtype: Dtype = "auto",
        outage_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_refusal` is called for jobs of another tenant; `dtype` is what `auto` means."""
        self._upstream = upstream
        self._on_refusal = on_refusal
        self._resolve = partial(resolve_job, dtype=dtype)
        self._outage_s = outage_s
        self._clock = clock
        self._patterns = Patterns()
        self._trial = trial

    async def submit(self, request: pb.SubmitJobRequest, who: Principal) -> types_pb2.Job:
        """Check a job and submit it with the small files of its model.

        Raises:
            ConfigError: the job is invalid; the message names the field.
            PermissionDeniedError: it is for another tenant.
        """
        raw = await asyncio.to_thread(decode, request.spec_json, allow_yaml=False)
        return await self.submit_parsed(raw, request, who)

    async def submit_parsed(
        self, raw: Any, request: pb.SubmitJobRequest, who: Principal
    ) -> types_pb2.Job:
        """As `submit`, for a job file that is already parsed."""
        checked(request)
        spec = self._with_tenant(await asyncio.to_thread(self._resolve, raw), who)
        check_code(spec)
        await check_plugins(spec, self._patterns, who.tenant)
        if request.files:
            files = await asyncio.to_thread(check_files, request.files, source="files")
        else:
            files = await asyncio.to_thread(read_model, Path(spec.model.path))
        await self._trial.check(files, who.tenant)
        complete = pb.SubmitJobRequest(
            spec_json=spec.model_dump_json(),
            # Without one from the user, a random one still makes our own retries idempotent.
            request_id=request.request_id or uuid.uuid4().hex,
            files=files,
        )
        job = await self._upstream.call(SUBMIT, complete, who, timeout_s=SUBMIT_S)
        log.info(
            "submitted",
            job=job.status.job_id,
            name=spec.name,
            tenant=spec.tenant,
            dtype=spec.model.dtype,
        )
        return job

    async def watch(
        self, request: pb.WatchJobRequest, who: Principal
    ) -> AsyncIterator[pb.JobEvent]:
        """The present state and every change until the job ends; resumes after outages."""
        seen = checked(request).after_metric
        state: JobState | None = None
        attempt = 0
        lost_at: float | None = None
        while state is None or not state.terminal:
            try:
                resumed = pb.WatchJobRequest(job_id=request.job_id, after_metric=seen)
                events = self._upstream.stream(WATCH, resumed, who)
                async with aclosing(events):  # pyright: ignore[reportArgumentType]
                    async for event in events:
                        seen += len(event.metrics)
                        state = wire.member_of(JobState, event.status.state, "state")
                        attempt, lost_at = 0, None
                        yield event
            except (UnavailableError, DeadlineError):
                lost_at = self._clock() if lost_at is None else lost_at
                if state is None or self._clock() - lost_at > self._outage_s:
                    raise
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    def _with_tenant(self, spec: JobSpec, who: Principal) -> JobSpec:
        """The job with its tenant: that of the caller, unless the caller may choose."""
        if who.tenant == ALL_TENANTS:
            return spec
        if spec.tenant == JobSpec.model_fields["tenant"].default:
            return spec.model_copy(update={"tenant": who.tenant})
        try:
            who.check_tenant(spec.tenant)
        except PermissionDeniedError:
            self._on_refusal(Refusal(who, who.source, "job.submit", "tenant"))
            raise
        return spec


def decode(text: str | bytes, *, allow_yaml: bool) -> Any:
    """Parse a job file: JSON, or with `allow_yaml` YAML.

    Raises:
        InvalidError: it cannot be parsed, or is too large.
    """
    if len(text.encode() if isinstance(text, str) else text) > MAX_SPEC_BYTES:
        raise too_large()
    return read_yaml(text, what="job") if allow_yaml else read_json(text, what="job")


def too_large() -> InvalidError:
    """The error for a job file above the limit."""
    return InvalidError(f"job: is too large; at most {MAX_SPEC_BYTES} bytes are allowed")
