"""Is this process alive, and can it serve?"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from paceline_gateway.jobs import Desk
from paceline_gateway.routes.jobs import ERRORS, desk_of

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=ERRORS)
async def readyz(desk: Annotated[Desk, Depends(desk_of)]) -> dict[str, str]:
    """Jobs can be submitted: the experience service answers too."""
    await desk.ready()
    return {"status": "ready"}
