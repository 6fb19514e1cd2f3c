"""Quotas and use of tenants over REST."""

from __future__ import annotations

from fastapi import APIRouter

from paceline.config.quota import Quota
from paceline.rest import TenantPage, TenantView
from paceline.tenants import quota_to
from paceline.v1 import tenants_pb2 as pb
from paceline_gateway import views
from paceline_gateway.routes.access import Office
from paceline_gateway.routes.jobs import ERRORS, Caller

router = APIRouter(prefix="/v1/tenants", tags=["tenants"], responses=ERRORS)


@router.get("")
async def list_tenants(office: Office, who: Caller, tenant: str = "") -> TenantPage:
    """Quotas and use, by tenant; callers of a tenant see their own."""
    return views.tenant_page(await office.tenants(pb.ListTenantsRequest(tenant=tenant), who))


@router.put("/{tenant}/quota")
async def set_quota(tenant: str, quota: Quota, office: Office, who: Caller) -> TenantView:
    """The whole quota: a limit that is not named is none. What runs goes on, even above it."""
    message = pb.SetQuotaRequest(tenant=tenant, quota=quota_to(quota))
    return views.tenant_view(await office.set_quota(message, who))


@router.delete("/{tenant}/quota")
async def reset_quota(tenant: str, office: Office, who: Caller) -> TenantView:
    """The default of the installation again."""
    return views.tenant_view(await office.set_quota(pb.SetQuotaRequest(tenant=tenant), who))
