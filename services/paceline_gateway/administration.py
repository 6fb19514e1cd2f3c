"""Tokens, the audit log and quotas: what REST and gRPC both call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.access import Principal
from paceline.rpc import call
from paceline.v1 import access_pb2 as pb
from paceline.v1 import tenants_pb2
from paceline_gateway.messages import checked
from paceline_gateway.readiness import plainly

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import AccessAsyncStub
    from paceline.v1.tenants_pb2_grpc import TenantsAsyncStub


class Administration:
    """Everything an admin can ask for. Messages in, messages out."""

    def __init__(
        self, *, access: AccessAsyncStub, tenants: TenantsAsyncStub, timeout_s: float = 10.0
    ) -> None:
        self._access = access
        self._tenants = tenants
        self._timeout_s = timeout_s

    async def create_token(
        self, request: pb.CreateTokenRequest, who: Principal
    ) -> pb.CreateTokenReply:
        """A new token. Never tried twice: the answer to the first may have been seen."""
        with plainly():
            return await call(
                self._access.CreateToken,
                checked(request),
                timeout_s=self._timeout_s,
                on_behalf_of=who,
            )

    async def list_tokens(
        self, request: pb.ListTokensRequest, who: Principal
    ) -> pb.ListTokensReply:
        """Tokens, without their secrets."""
        return await self._call(self._access.ListTokens, request, who)

    async def revoke_token(self, request: pb.RevokeTokenRequest, who: Principal) -> pb.Token:
        """A token that opens nothing any more."""
        return await self._call(self._access.RevokeToken, request, who)

    async def audit_log(self, request: pb.ListAuditRequest, who: Principal) -> pb.ListAuditReply:
        """A page of the audit log."""
        return await self._call(self._access.ListAudit, request, who)

    async def tenants(
        self, request: tenants_pb2.ListTenantsRequest, who: Principal
    ) -> tenants_pb2.ListTenantsReply:
        """Quotas and use."""
        return await self._call(self._tenants.ListTenants, request, who)

    async def set_quota(
        self, request: tenants_pb2.SetQuotaRequest, who: Principal
    ) -> tenants_pb2.Tenant:
        """A tenant with its new quota."""
        return await self._call(self._tenants.SetQuota, request, who)

    async def _call(self, method: Any, request: Any, who: Principal) -> Any:
        with plainly():
            return await call(
                method,
                checked(request),
                timeout_s=self._timeout_s,
                idempotent=True,
                on_behalf_of=who,
            )
