"""Tokens and the audit log over gRPC."""

from __future__ import annotations

from typing import Any

from paceline import access
from paceline.access import ALL_TENANTS, Principal, Role, caller, role_of
from paceline.v1 import access_pb2 as pb
from paceline.v1 import access_pb2_grpc
from paceline_experience.access.audit_log import AuditLog, Entry
from paceline_experience.access.tokens import Token, Tokens


class AccessServicer(access_pb2_grpc.AccessServicer):
    """What admins call, by way of the gateway."""

    def __init__(self, *, tokens: Tokens, audit: AuditLog) -> None:
        self._tokens = tokens
        self._audit = audit

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: Any
    ) -> pb.CreateTokenReply:
        """The only answer with the token itself."""
        made, secret = await self._tokens.create(
            caller(context),
            name=request.name,
            role=role_of(request.role),
            tenant=request.tenant,
            expires_in_s=request.expires_in_s if request.HasField("expires_in_s") else None,
        )
        return pb.CreateTokenReply(token=token_to(made), secret=secret)

    async def ListTokens(self, request: pb.ListTokensRequest, context: Any) -> pb.ListTokensReply:
        """Those that the caller may see."""
        who = caller(context)
        who.check_role(Role.ADMIN)
        tenant = who.narrowed(request.tenant)
        found = [] if tenant is None else await self._tokens.listed(tenant)
        return pb.ListTokensReply(tokens=map(token_to, found))

    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Any) -> pb.Token:
        """From now on it opens nothing."""
        return token_to(await self._tokens.revoke(caller(context), request.token_id))

    async def ListAudit(self, request: pb.ListAuditRequest, context: Any) -> pb.ListAuditReply:
        """A page of the audit log, newest first."""
        who = caller(context)
        who.check_role(Role.ADMIN)
        tenant = who.narrowed(request.tenant)
        if tenant is None:
            return pb.ListAuditReply()
        found, more = await self._audit.page(
            before=request.before,
            page_size=request.page_size,
            tenant=tenant,
            action=request.action,
        )
        return pb.ListAuditReply(entries=map(entry_to, found), next=more)


class GatekeeperServicer(access_pb2_grpc.GatekeeperServicer):
    """What the gateway asks about its callers."""

    def __init__(self, *, tokens: Tokens, audit: AuditLog) -> None:
        self._tokens = tokens
        self._audit = audit

    async def Authenticate(
        self, request: pb.AuthenticateRequest, context: Any
    ) -> pb.AuthenticateReply:
        """Whose token this is."""
        who, left_s = await self._tokens.authenticate(request.token_id, request.digest)
        return pb.AuthenticateReply(principal=access.to_message(who), expires_in_s=left_s)

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportReply:
        """Note refusals."""
        for refusal in request.refusals:
            who = refusal.principal
            await self._audit.write(
                Principal(who.token_id, who.name, who.tenant, _role(who.role), who.source),
                refusal.action,
                tenant=who.tenant or ALL_TENANTS,
                target=refusal.target,
                outcome="refused",
                detail=refusal.detail,
                count=refusal.count,
            )
        return pb.ReportReply()


def _role(name: str) -> Role:
    return role_of(name) if name else Role.READ


def token_to(token: Token) -> pb.Token:
    """A token as it travels."""
    return pb.Token(
        token_id=token.token_id,
        name=token.name,
        tenant=token.tenant,
        role=token.role,
        age_s=token.age_s,
        expires_in_s=token.expires_in_s,
        used_s=token.used_s,
        revoked=token.revoked,
        created_by=token.created_by,
    )


def entry_to(entry: Entry) -> pb.AuditEntry:
    """An entry of the audit log as it travels."""
    return pb.AuditEntry(
        id=entry.id,
        time=entry.time,
        principal=pb.Principal(
            token_id=entry.token_id,
            name=entry.name,
            tenant=entry.tenant_of_caller,
            role=entry.role,
            source=entry.source,
        ),
        action=entry.action,
        tenant=entry.tenant,
        target=entry.target,
        outcome=entry.outcome,
        detail=entry.detail,
        count=entry.count,
    )
