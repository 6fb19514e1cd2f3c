"""Tokens and the audit log over gRPC."""

from __future__ import annotations

from typing import Any

from paceline.enums import AuditOutcome
from paceline.platform import wire
from paceline.platform.transport.operations import bounded
from paceline.platform.transport.principal import ALL_TENANTS, Principal, Role, caller
from paceline.v1 import access_pb2 as pb
from paceline.v1 import access_pb2_grpc
from paceline_experience.tenancy.audit_log import AuditEntry, AuditLog
from paceline_experience.tenancy.tokens import Tokens


class AccessServicer(access_pb2_grpc.AccessServicer):
    """Called by admins through the gateway."""

    def __init__(self, *, tokens: Tokens, audit: AuditLog) -> None:
        self._tokens = tokens
        self._audit = audit

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: Any
    ) -> pb.CreateTokenReply:
        """Create a token; the only answer that contains the token itself."""
        made, secret = await self._tokens.create(
            caller(context),
            name=request.name,
            role=wire.member_of(Role, request.role, "role") if request.role else Role.SUBMIT,
            tenant=request.tenant,
            expires_in_s=request.expires_in_s if request.HasField("expires_in_s") else None,
            no_code=request.no_code,
        )
        return pb.CreateTokenReply(token=wire.to_proto(made, pb.Token), secret=secret)

    async def ListTokens(self, request: pb.ListTokensRequest, context: Any) -> pb.ListTokensReply:
        """Tokens that the caller may see."""
        who = caller(context)
        who.check_role(Role.ADMIN)
        tenant = who.narrowed(request.tenant)
        found = [] if tenant is None else await self._tokens.listed(tenant)
        return pb.ListTokensReply(tokens=[wire.to_proto(each, pb.Token) for each in found])

    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Any) -> pb.Token:
        """Revoke a token."""
        revoked = await self._tokens.revoke(caller(context), request.token_id)
        return wire.to_proto(revoked, pb.Token)

    async def ListAudit(self, request: pb.ListAuditRequest, context: Any) -> pb.ListAuditReply:
        """A page of the audit log, newest first."""
        who = caller(context)
        who.check_role(Role.ADMIN)
        tenant = who.narrowed(request.tenant)
        if tenant is None:
            return pb.ListAuditReply()
        found, more = await self._audit.page(
            before=request.before,
            page_size=bounded(request, "page_size"),
            tenant=tenant,
            action=request.action,
        )
        return pb.ListAuditReply(entries=map(entry_to, found), next=more)


class AuthenticationServicer(access_pb2_grpc.AuthenticationServicer):
    """Called by the gateway about its callers."""

    def __init__(self, *, tokens: Tokens, audit: AuditLog) -> None:
        self._tokens = tokens
        self._audit = audit

    async def Authenticate(
        self, request: pb.AuthenticateRequest, context: Any
    ) -> pb.AuthenticateReply:
        """The principal of a token."""
        who, left_s = await self._tokens.authenticate(request.token_id, request.digest)
        return pb.AuthenticateReply(principal=wire.to_proto(who, pb.Principal), expires_in_s=left_s)

    async def ReportRefusals(
        self, request: pb.ReportRefusalsRequest, context: Any
    ) -> pb.ReportRefusalsReply:
        """Add refusals to the audit log."""
        for refusal in request.refusals:
            who = refusal.principal
            await self._audit.write(
                Principal(who.token_id, who.name, who.tenant, _role(who.role), who.source),
                refusal.action,
                tenant=who.tenant or ALL_TENANTS,
                target=refusal.target,
                outcome=AuditOutcome.REFUSED,
                detail=refusal.detail,
                count=refusal.count,
            )
        return pb.ReportRefusalsReply()


def _role(number: int) -> Role:
    return wire.member_of(Role, number, "role") if number else Role.READ


def entry_to(entry: AuditEntry) -> pb.AuditEntry:
    """An entry of the audit log as a message."""
    return pb.AuditEntry(
        id=entry.id,
        time=entry.time,
        principal=pb.Principal(
            token_id=entry.token_id,
            name=entry.name,
            tenant=entry.tenant_of_caller,
            role=wire.number_of(entry.role),
            source=entry.source,
        ),
        action=entry.action,
        tenant=entry.tenant,
        target=entry.target,
        outcome=wire.number_of(entry.outcome),
        detail=entry.detail,
        count=entry.count,
    )
