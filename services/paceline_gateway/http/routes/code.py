"""The route that takes code for jobs: an archive, not JSON."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from paceline.api.documents import CodeView
from paceline.errors import InvalidError
from paceline.v1 import jobs_pb2 as pb
from paceline_gateway.http.routes.common import ERRORS, Caller
from paceline_gateway.http.views import view
from paceline_gateway.job_api import UPLOAD
from paceline_gateway.operations import Handler

ZIP = "application/zip"
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {ZIP: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def router_of(upload: Handler) -> APIRouter:
    """A router with this route."""
    router = APIRouter(tags=["jobs"], responses=ERRORS)

    @router.post(
        UPLOAD.routes[0].path,
        status_code=201,
        openapi_extra=BODY,
        response_model=CodeView,
        description=UPLOAD.summary,
    )
    async def upload_code(request: Request, who: Caller) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Upload a zip archive."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != ZIP:
            raise InvalidError(f"content-type: {media[:80]!r} is not {ZIP}")
        code = await upload(pb.UploadCodeRequest(archive=await request.body()), who)
        return Response(
            view(code).model_dump_json(), status_code=201, media_type="application/json"
        )

    return router
