"""Is this process alive, and can it serve?"""

from __future__ import annotations

from fastapi import APIRouter, Request

from paceline_gateway.readiness import Readiness
from paceline_gateway.routes.jobs import ERRORS

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=ERRORS)
async def readyz(request: Request) -> dict[str, str]:
    """Jobs can be submitted: the experience service answers too."""
    readiness: Readiness = request.app.state.readiness
    await readiness.ready()
    return {"status": "ready"}
