"""Jobs over REST."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from paceline.access import Principal
from paceline.rest import (
    AuditView,
    ErrorView,
    JobPage,
    JobView,
    MetricPage,
    TrajectoryPage,
    WeightsView,
)
from paceline.types import JobState, Purpose
from paceline.v1 import jobs_pb2 as pb
from paceline.v1.roster_pb2 import ListWeightsRequest
from paceline_gateway import views
from paceline_gateway.events import lines
from paceline_gateway.jobs import Desk, decode
from paceline_gateway.messages import MAX_INTEGER, MAX_TEXT

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorView} for code in (401, 403, 404, 408, 409, 422, 429, 503, 504)
}
JOB_REF = {"schema": {"$ref": "#/components/schemas/JobSpec"}}
JOB_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": JOB_REF, "application/yaml": JOB_REF},
    }
}
YAML_TYPES = {"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"}

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ERRORS)


def desk_of(request: Request) -> Desk:
    """The desk that the app was made with."""
    return request.app.state.desk


def caller_of(request: Request) -> Principal:
    """Who calls, as the guard has found; see `guard.RestGuard`."""
    return request.state.principal


TheDesk = Annotated[Desk, Depends(desk_of)]
Caller = Annotated[Principal, Depends(caller_of)]
Reason = Annotated[str, Query(max_length=MAX_TEXT)]
LastEventId = Annotated[int, Header(ge=0, le=MAX_INTEGER, description="Metric rows already seen.")]
PageToken = Annotated[str, Query(description="`next_page_token` of the page before.")]


@router.post("", status_code=201, openapi_extra=JOB_BODY)
async def submit(
    request: Request,
    desk: TheDesk,
    who: Caller,
    idempotency_key: Annotated[str, Header(description="The same key, the same job.")] = "",
) -> JobView:
    """Submit a job file, as JSON or (content type `application/yaml`) as YAML."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    raw = await asyncio.to_thread(decode, body, yaml_too=media in YAML_TYPES)
    message = pb.SubmitJobRequest(request_id=idempotency_key)
    return views.job_view(await desk.submit_read(raw, message, who))


@router.get("")
async def list_jobs(
    desk: TheDesk,
    who: Caller,
    tenant: str = "",
    state: Annotated[list[JobState], Query()] = [],  # noqa: B006
    page_size: Annotated[int, Query(ge=1, le=1000)] = 100,
    page_token: PageToken = "",
) -> JobPage:
    """Jobs, of one tenant or in some states if asked."""
    message = pb.ListJobsRequest(
        tenant=tenant, states=state, page_size=page_size, page_token=page_token
    )
    return views.job_page(await desk.list_jobs(message, who))


@router.get("/{job_id}")
async def get(job_id: str, desk: TheDesk, who: Caller) -> JobView:
    """One job."""
    return views.job_view(await desk.get(pb.GetJobRequest(job_id=job_id), who))


@router.post("/{job_id}/cancel")
@router.delete("/{job_id}")
async def cancel(job_id: str, desk: TheDesk, who: Caller, reason: Reason = "") -> JobView:
    """Ask a job to end; its record stays."""
    message = pb.CancelJobRequest(job_id=job_id, reason=reason)
    return views.job_view(await desk.cancel(message, who))


@router.get("/{job_id}/events", response_class=StreamingResponse)
async def events(
    job_id: str,
    desk: TheDesk,
    who: Caller,
    last_event_id: LastEventId = 0,
) -> StreamingResponse:
    """Server-sent events until the job ends; each one is a `JobEvent`, the last is `end`."""
    source = desk.watch(pb.WatchJobRequest(job_id=job_id, after_metric=last_event_id), who)
    # Fetched here so that a job that does not exist is a 404 and not a broken stream.
    first = await anext(source)
    return StreamingResponse(
        lines(first, source, seen=last_event_id),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


@router.get("/{job_id}/metrics")
async def metrics(
    job_id: str,
    desk: TheDesk,
    who: Caller,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0,
    page_size: Annotated[int, Query(ge=1, le=5000)] = 500,
) -> MetricPage:
    """Metric rows, `after` of them skipped."""
    message = pb.ListMetricsRequest(job_id=job_id, after=after, page_size=page_size)
    return views.metric_page(await desk.metrics(message, who))


@router.get("/{job_id}/trajectories", response_model=TrajectoryPage)
async def trajectories(
    job_id: str,
    desk: TheDesk,
    who: Caller,
    page_size: Annotated[int, Query(ge=1, le=200)] = 20,
    page_token: PageToken = "",
    purpose: Purpose = Purpose.TRAIN,
) -> Response:
    """Trajectories with tokens, spans, text and scores."""
    message = pb.ListTrajectoriesRequest(
        job_id=job_id, page_size=page_size, page_token=page_token, purpose=purpose
    )
    page = views.trajectory_page(await desk.trajectories(message, who))
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/{job_id}/audit")
async def audit(job_id: str, desk: TheDesk, who: Caller) -> AuditView:
    """Check the ledger's identity now."""
    return views.audit_view(await desk.audit(pb.AuditJobRequest(job_id=job_id), who))


@router.get("/{job_id}/weights")
async def weights(job_id: str, desk: TheDesk, who: Caller) -> WeightsView:
    """The versions of the weights, who has what of them, and from whom."""
    return views.weights_view(await desk.weights(ListWeightsRequest(job_id=job_id), who))
