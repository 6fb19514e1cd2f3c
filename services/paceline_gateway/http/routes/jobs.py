"""The two routes with code of their own: job files, and streams of events."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import StreamingResponse

from paceline.front.api.documents import (
    JobView,
)
from paceline.v1 import jobs_pb2 as pb
from paceline_gateway.http.events import lines
from paceline_gateway.http.routes.common import ERRORS, Caller
from paceline_gateway.http.views import view
from paceline_gateway.job_api import SUBMIT, WATCH, JobApi, decode
from paceline_gateway.messages import MAX_INTEGER

JOB_REF = {"schema": {"$ref": "#/components/schemas/JobSpec"}}
JOB_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": JOB_REF, "application/yaml": JOB_REF},
    }
}
YAML_TYPES = {"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"}

router = APIRouter(tags=["jobs"], responses=ERRORS)


def jobs_of(request: Request) -> JobApi:
    """The `JobApi` of the application."""
    return request.app.state.jobs


Jobs = Annotated[JobApi, Depends(jobs_of)]
LastEventId = Annotated[int, Header(ge=0, le=MAX_INTEGER, description="Metric rows already seen.")]


@router.post(
    SUBMIT.routes[0].path,
    status_code=201,
    openapi_extra=JOB_BODY,
    response_model=JobView,
    description=SUBMIT.summary,
)
async def submit(
    request: Request,
    jobs: Jobs,
    who: Caller,
    idempotency_key: Annotated[str, Header(description="The same key, the same job.")] = "",
) -> Response:
    """Submit a job file, as JSON or (content type `application/yaml`) as YAML."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    raw = await asyncio.to_thread(decode, body, allow_yaml=media in YAML_TYPES)
    message = pb.SubmitJobRequest(request_id=idempotency_key)
    job = await jobs.submit_parsed(raw, message, who)
    return Response(view(job).model_dump_json(), status_code=201, media_type="application/json")


@router.get(WATCH.routes[0].path, response_class=StreamingResponse, description=WATCH.summary)
async def events(
    job_id: str,
    jobs: Jobs,
    who: Caller,
    last_event_id: LastEventId = 0,
) -> StreamingResponse:
    """Server-sent events until the job ends; each one is a `JobEvent`, the last is `end`."""
    source = jobs.watch(pb.WatchJobRequest(job_id=job_id, after_metric=last_event_id), who)
    # Fetched here, so that an unknown job is a 404 and not a broken stream.
    first = await anext(source)
    return StreamingResponse(
        lines(first, source, seen=last_event_id),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )
