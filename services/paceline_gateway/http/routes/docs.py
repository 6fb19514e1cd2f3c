"""The API documentation at `/docs`, with all its assets."""

from __future__ import annotations

from pathlib import Path

import fastapi_offline
from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, Response

from paceline.errors import NotFoundError

STATIC = Path(fastapi_offline.__file__).parent / "static"
ASSETS = {"swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"}
# Swagger UI sets inline styles.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Paceline</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon.png">
</head>
<body>
<div id="docs"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = "SwaggerUIBundle({url: 'openapi.json', dom_id: '#docs', deepLinking: true});\n"

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs() -> HTMLResponse:
    """The page."""
    return HTMLResponse(PAGE, headers=HEADERS)


@router.get("/docs/{asset}")
async def asset(asset: str) -> Response:
    """An asset of the page."""
    if asset == "start.js":
        return Response(START, media_type="text/javascript", headers=HEADERS)
    if asset not in ASSETS:
        raise NotFoundError(f"/docs/{asset}: Not Found")
    return FileResponse(STATIC / asset, headers=HEADERS)
