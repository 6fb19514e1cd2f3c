"""The route that takes code for jobs: an archive, not JSON."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from paceline.errors import InvalidError
from paceline.front.api.documents import CodeView
from paceline.v1 import jobs_pb2 as pb
from paceline_gateway.http.routes.common import ERRORS, Caller
from paceline_gateway.http.views import view
from paceline_gateway.job_api import UPLOAD
from paceline_gateway.operations import Handler

ZIP = "application/zip"
_SHA256 = re.compile(r"(?:^|[\s,])sha-256=:([^:]*):")
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {ZIP: {"schema": {"type": "string", "format": "binary"}}},
    }
}


async def _pieces(request: Request) -> AsyncIterator[pb.UploadCodeRequest]:
    """The body as it arrives, after what the headers say of the whole."""
    length = int(request.headers.get("content-length", "0"))
    yield pb.UploadCodeRequest(num_bytes=length, digest=_digest_of(request))
    async for data in request.stream():
        yield pb.UploadCodeRequest(archive=data)


def _digest_of(request: Request) -> str:
    """The SHA-256 in the header `Repr-Digest` (RFC 9530), in hexadecimal; empty: it has none."""
    match = _SHA256.search(request.headers.get("repr-digest", ""))
    if match is None:
        return ""
    try:
        return base64.b64decode(match[1], validate=True).hex()
    except binascii.Error:
        raise InvalidError("repr-digest: is not the base64 of a digest") from None


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
        try:
            code = await upload(_pieces(request), who)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        return Response(
            view(code).model_dump_json(), status_code=201, media_type="application/json"
        )

    return router
