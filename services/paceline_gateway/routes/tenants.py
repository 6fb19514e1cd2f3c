"""Quotas and use of tenants over REST."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import ConfigDict

from paceline.config.quota import Quota
from paceline.rest import TenantPage, TenantView
from paceline.v1 import tenants_pb2 as pb
from paceline_gateway import views
from paceline_gateway.routes.access import Office
from paceline_gateway.routes.jobs import ERRORS, Caller


def _without_defaults(schema: dict[str, Any]) -> None:
    for field in schema["properties"].values():
        field.pop("default", None)


class QuotaBody(Quota):
    """The whole quota of a tenant.

    Of the limits on what there is at a time, one that is null or not named is none. A size or a
    weight that is not named is that of the installation.
    """

    model_config = ConfigDict(json_schema_extra=_without_defaults)


router = APIRouter(prefix="/v1/tenants", tags=["tenants"], responses=ERRORS)


@router.get("")
async def list_tenants(office: Office, who: Caller, tenant: str = "") -> TenantPage:
    """Quotas and use, by tenant; callers of a tenant see their own."""
    return views.tenant_page(await office.tenants(pb.ListTenantsRequest(tenant=tenant), who))


@router.put("/{tenant}/quota")
async def set_quota(tenant: str, quota: QuotaBody, office: Office, who: Caller) -> TenantView:
    """The whole quota. What runs goes on, even above it."""
    named = quota.model_dump(exclude_unset=True, exclude_none=True)
    message = pb.SetQuotaRequest(tenant=tenant, quota=pb.Quota(**named))
    return views.tenant_view(await office.set_quota(message, who))


@router.delete("/{tenant}/quota")
async def reset_quota(tenant: str, office: Office, who: Caller) -> TenantView:
    """The default of the installation again."""
    return views.tenant_view(await office.set_quota(pb.SetQuotaRequest(tenant=tenant), who))
