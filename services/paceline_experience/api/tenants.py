"""The tenants API over gRPC."""

from __future__ import annotations

from typing import Any

from paceline.errors import PermissionDeniedError
from paceline.front.api.tenants import quota_from, tenant_to
from paceline.platform.transport.principal import ALL_TENANTS, Role, caller
from paceline.v1 import tenants_pb2 as pb
from paceline.v1 import tenants_pb2_grpc
from paceline_experience.tenancy.audit_log import AuditLog
from paceline_experience.usage.tenants import Tenants


class TenantsServicer(tenants_pb2_grpc.TenantsServicer):
    """Called by users through the gateway, and by the controller."""

    def __init__(self, *, tenants: Tenants, audit: AuditLog) -> None:
        self._tenants = tenants
        self._audit = audit

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Any
    ) -> pb.ListTenantsReply:
        """Quotas and usage; callers of a tenant see their own."""
        only = caller(context).narrowed(request.tenant)
        found = [] if only is None else await self._tenants.tenants(only)
        return pb.ListTenantsReply(tenants=map(tenant_to, found))

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Any) -> pb.Tenant:
        """Set or reset a quota; tenants cannot set their own."""
        who = caller(context)
        async with self._audit.change(
            who, "quota.set", tenant=who.tenant, target=request.tenant
        ) as change:
            who.check_role(Role.ADMIN)
            if not who.sees(ALL_TENANTS):
                raise PermissionDeniedError(
                    "quotas are set by admins of the installation, not of a tenant"
                )
            own = request.HasField("quota")
            quota = quota_from(request.quota, self._tenants.default) if own else None
            change.repeated = self._tenants.own_quota(request.tenant) == quota
            found = await self._tenants.set(request.tenant, quota)
        return tenant_to(found)
