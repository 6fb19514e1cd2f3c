"""The tenants API over gRPC."""

from __future__ import annotations

from typing import Any

from paceline.access import ALL_TENANTS, Role, caller
from paceline.errors import PermissionDeniedError
from paceline.tenants import quota_from, tenant_to
from paceline.v1 import tenants_pb2 as pb
from paceline.v1 import tenants_pb2_grpc
from paceline_experience.access.audit_log import AuditLog
from paceline_experience.tenants import Tenants


class TenantsServicer(tenants_pb2_grpc.TenantsServicer):
    """What users call by way of the gateway, and the controller on its own."""

    def __init__(self, *, tenants: Tenants, audit: AuditLog) -> None:
        self._tenants = tenants
        self._audit = audit

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Any
    ) -> pb.ListTenantsReply:
        """Quotas and use; callers of a tenant see their own."""
        only = caller(context).narrowed(request.tenant)
        found = [] if only is None else await self._tenants.tenants(only)
        return pb.ListTenantsReply(tenants=map(tenant_to, found))

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Any) -> pb.Tenant:
        """Set or reset a quota; no tenant sets its own."""
        who = caller(context)
        async with self._audit.change(who, "quota.set", tenant=who.tenant, target=request.tenant):
            who.check_role(Role.ADMIN)
            if not who.sees(ALL_TENANTS):
                raise PermissionDeniedError(
                    "quotas are set by admins of the installation, not of a tenant"
                )
            own = request.HasField("quota")
            quota = quota_from(request.quota, self._tenants.default) if own else None
            return tenant_to(await self._tenants.set(request.tenant, quota))
