"""Liveness and readiness."""

from __future__ import annotations

from fastapi import APIRouter, Request

from paceline_gateway.http.routes.common import ERRORS
from paceline_gateway.readiness import Readiness

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=ERRORS)
async def readyz(request: Request) -> dict[str, str]:
    """Jobs can be submitted: the experience service answers too."""
    readiness: Readiness = request.app.state.readiness
    await readiness.ready()
    return {"status": "ready"}
