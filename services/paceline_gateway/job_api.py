"""Calls that the gateway handles itself: checked submits, and watches that resume."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.config import JobSpec, resolve_job
from paceline.config.documents import read_json, read_yaml
from paceline.config.precision import Dtype
from paceline.config.quota import MAX_CODE_BYTES, MAX_SPEC_BYTES
from paceline.enums import JobState
from paceline.errors import (
    DeadlineError,
    InvalidError,
    LimitError,
    PacelineError,
    PermissionDeniedError,
    UnavailableError,
)
from paceline.models.resolve import ModelResolver
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.operations import CODE_BYTES_KEY, operation
from paceline.platform.transport.principal import ALL_TENANTS, Principal
from paceline.platform.transport.request_reader import timely
from paceline.platform.transport.rpc import backoff_s
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets
from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import types_pb2
from paceline_gateway.access.refusals import Refusal
from paceline_gateway.messages import checked
from paceline_gateway.submit.checks import check_code
from paceline_gateway.submit.job_checks import JobChecks
from paceline_gateway.submit.trial import ModelTrial
from paceline_gateway.upstream import Upstream

if TYPE_CHECKING:
    from paceline_gateway.submit.probe import ModelProbe

log = Log("jobs")
SUBMIT = operation("Jobs", "SubmitJob")
UPLOAD = operation("Jobs", "UploadCode")
WATCH = operation("Jobs", "WatchJob")
UPLOAD_S = 900.0
PIECE_BYTES = 1 << 20
DRAIN_S = 5.0
SUBMIT_S = 60.0  # plug-ins are tried, and tasks of a job's own code are listed


class JobApi:
    """Submits and watches jobs for users. Messages in, messages out."""

    def __init__(
        self,
        *,
        upstream: Upstream,
        on_refusal: Callable[[Refusal], None],
        trial: ModelTrial,
        models: ModelResolver,
        allowed: AllowedTargets = NO_TARGETS,
        dtype: Dtype = "auto",
        probe: ModelProbe | None = None,
        endpoints: Collection[str] | None = None,
        outage_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_refusal` is called for jobs of another tenant; `dtype` is what `auto` means.

        `allowed`: functions of installed modules that jobs may name. `probe`: None where models
        cannot be computed before their job is accepted. `endpoints`: as of `JobChecks`.
        """
        self._upstream = upstream
        self._on_refusal = on_refusal
        self._resolve = partial(resolve_job, dtype=dtype)
        self._outage_s = outage_s
        self._clock = clock
        self._checks = JobChecks(
            trial=trial, models=models, allowed=allowed, probe=probe, endpoints=endpoints
        )

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
        """`submit` for a job file that is already parsed."""
        checked(request)
        spec = self._with_tenant(await asyncio.to_thread(self._resolve, raw), who)
        check_code(spec)
        await self._checks.check_plugins(spec, who.tenant)
        spec, files = await self._checks.check_model(spec, dict(request.files), who.tenant)
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

    async def upload(
        self, requests: AsyncIterator[pb.UploadCodeRequest], who: Principal
    ) -> pb.Code:
        """Pass on an archive of code, piece by piece as it arrives."""
        arriving = timely(requests)
        first = await anext(arriving, pb.UploadCodeRequest())
        announced = [(CODE_BYTES_KEY, str(checked(first).num_bytes))]
        pieces = _pieces(first, arriving)
        try:
            code = await self._upstream.send(
                UPLOAD, pieces, who, timeout_s=UPLOAD_S, metadata=announced
            )
        except PacelineError:
            await _drain(arriving)
            raise
        log.info("uploaded", code=code.digest, files=code.num_files, tenant=who.tenant)
        return code

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


async def _pieces(
    first: pb.UploadCodeRequest, rest: AsyncIterator[pb.UploadCodeRequest]
) -> AsyncIterator[pb.UploadCodeRequest]:
    """The same archive in pieces of bounded size."""
    announced = pb.UploadCodeRequest(digest=first.digest, num_bytes=first.num_bytes)
    yield announced
    total, message = 0, first
    while message is not None:
        total += len(message.archive)
        if total > MAX_CODE_BYTES:
            raise LimitError(f"code: more than {MAX_CODE_BYTES} bytes, which nobody may upload")
        for start in range(0, len(message.archive), PIECE_BYTES):
            yield pb.UploadCodeRequest(archive=message.archive[start : start + PIECE_BYTES])
        message = await anext(rest, None)


async def _drain(requests: AsyncIterator[pb.UploadCodeRequest]) -> None:
    """Read on for a while: many clients read an answer only when they have sent everything."""
    with suppress(TimeoutError, PacelineError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in requests:
                pass


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
