"""Tokens and the audit log over REST."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from paceline.rest import AuditLogPage, TokenMade, TokenPage, TokenRequest, TokenView
from paceline.v1 import access_pb2 as pb
from paceline_gateway import views
from paceline_gateway.administration import Administration
from paceline_gateway.routes.jobs import ERRORS, Caller

router = APIRouter(prefix="/v1", tags=["access"], responses=ERRORS)


def administration_of(request: Request) -> Administration:
    """The administration that the app was made with."""
    return request.app.state.administration


Office = Annotated[Administration, Depends(administration_of)]


@router.post("/tokens", status_code=201)
async def create_token(wanted: TokenRequest, office: Office, who: Caller) -> TokenMade:
    """A new token; this answer is the only one that holds it."""
    message = pb.CreateTokenRequest(
        name=wanted.name,
        tenant=wanted.tenant,
        role=wanted.role,
        expires_in_s=wanted.expires_in_s,
    )
    return views.token_made(await office.create_token(message, who))


@router.get("/tokens")
async def list_tokens(office: Office, who: Caller, tenant: str = "") -> TokenPage:
    """Tokens, oldest first; those that are over for a month."""
    return views.token_page(await office.list_tokens(pb.ListTokensRequest(tenant=tenant), who))


@router.delete("/tokens/{token_id}")
async def revoke_token(token_id: str, office: Office, who: Caller) -> TokenView:
    """From now on it opens nothing."""
    message = pb.RevokeTokenRequest(token_id=token_id)
    return views.token_view(await office.revoke_token(message, who))


@router.get("/audit-log")
async def audit_log(
    office: Office,
    who: Caller,
    before: Annotated[str, Query(description="`next` of the page before.")] = "",
    page_size: Annotated[int, Query(ge=1, le=1000)] = 100,
    tenant: str = "",
    action: Annotated[str, Query(description="`job.submit`, or `job.` for all of jobs.")] = "",
) -> AuditLogPage:
    """Who changed what, newest first."""
    message = pb.ListAuditRequest(before=before, page_size=page_size, tenant=tenant, action=action)
    return views.audit_log_page(await office.audit_log(message, who))
