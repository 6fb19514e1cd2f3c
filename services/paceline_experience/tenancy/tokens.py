"""Records of tokens in the store: owner, role, expiry. Never the token itself."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config.base import NAME
from paceline.enums import WorkerKind
from paceline.errors import (
    AuthenticationError,
    InvalidError,
    NotFoundError,
    StateError,
)
from paceline.platform.transport.principal import (
    ALL_TENANTS,
    Principal,
    Role,
    new_token,
    token_digest,
)
from paceline_experience.store.store import Store
from paceline_experience.tenancy.audit_log import AuditLog, Command, fields_of

# How long expired and revoked tokens are still listed.
KEEP_S = 30 * 86_400
# Valid tokens; as many invalid ones are kept.
MAX_PER_TENANT = 1000
_INDEX = "{access}:tokens"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._@ -]{0,61}[A-Za-z0-9])?")
# Names under which the installation itself appears in the audit log.
_RESERVED = frozenset({"bootstrap", "service", *WorkerKind})
_TENANT = re.compile(NAME)
_MAX_EXPIRY_S = 100 * 365 * 86_400.0
# Compared with the digest for a token that does not exist, so that it takes as long.
_NO_DIGEST = bytes(32).hex()


@dataclass(frozen=True, slots=True)
class Token:
    """The record of a token; times by the clock of the store."""

    token_id: str
    name: str
    tenant: str
    role: Role
    age_s: float
    expires_in_s: float | None
    used_s: float | None
    revoked: bool
    created_by: str
    no_code: bool = False  # jobs that it submits may bring none

    @property
    def invalid(self) -> bool:
        """Whether it has expired or was revoked."""
        return self.revoked or (self.expires_in_s is not None and self.expires_in_s <= 0)


class Tokens:
    """Issues, finds and revokes tokens."""

    def __init__(
        self,
        store: Store,
        audit: AuditLog,
        *,
        new_secret: Callable[[], tuple[str, str]] = new_token,
        max_per_tenant: int = MAX_PER_TENANT,
    ) -> None:
        self._store = store
        self._audit = audit
        self._new_secret = new_secret
        self._max_per_tenant = max_per_tenant
        self._tenants: dict[str, str] = {}  # by id; a token keeps its tenant

    async def create(
        self,
        who: Principal,
        *,
        name: str,
        role: Role,
        tenant: str = "",
        expires_in_s: float | None = None,
        no_code: bool = False,
    ) -> tuple[Token, str]:
        """Create a token; returns its record and the secret, which cannot be read again.

        Raises:
            InvalidError: the name, the tenant or the expiry is invalid.
            PermissionDeniedError: the caller belongs to another tenant, or may bring no code but
                wants a token that may.
            StateError: the tenant has too many.
        """
        tenant = tenant or who.tenant
        async with self._audit.refusals(who, "token.create", tenant=who.tenant) as change:
            _check(name, tenant, expires_in_s)
            who.check_role(Role.ADMIN)
            who.check_tenant(tenant)
            if not no_code:
                who.check_code()
            change.tenant = tenant
            found = await self.listed(tenant)
            invalid = [each.token_id for each in found if each.invalid]
            if len(found) - len(invalid) >= self._max_per_tenant:
                raise StateError(
                    f"tenant {tenant!r} has {self._max_per_tenant} tokens; "
                    "revoke some of them first"
                )
        token_id, secret = self._new_secret()
        now = await self._store.now()
        record: dict[str, str] = {
            "name": name,
            "tenant": tenant,
            "role": role,
            "digest": token_digest(secret).hex(),
            "created": repr(now),
            "created_by": who.name,
        }
        if no_code:
            record["no_code"] = "1"
        commands: list[Command] = [("ZADD", _INDEX, repr(now), token_id)]
        if forgotten := invalid[: max(0, len(invalid) - self._max_per_tenant)]:
            commands += [("DEL", *map(_key, forgotten)), ("ZREM", _INDEX, *forgotten)]
        if expires_in_s is not None:
            record["expires"] = repr(now + expires_in_s)
            commands.append(("EXPIRE", _key(token_id), int(expires_in_s) + KEEP_S))
        flat = [part for item in record.items() for part in item]
        commands.insert(0, ("HSET", _key(token_id), *flat))
        detail = f"{role} {name}" + (" (no code)" if no_code else "")
        await self._apply(who, "token.create", token_id, tenant, commands, detail=detail)
        return _token(token_id, record, now), secret

    async def listed(self, tenant: str = "") -> list[Token]:
        """Tokens of a tenant (empty: of all), oldest first; invalid ones for a month."""
        index = [each.decode() for each in await self._store.command("ZRANGE", _INDEX, 0, -1)]
        self._tenants = {each: self._tenants[each] for each in index if each in self._tenants}
        ids = [each for each in index if not tenant or self._tenants.get(each, tenant) == tenant]
        now = await self._store.now()
        records = await self._store.hashes(*map(_key, ids)) if ids else []
        found = dict(zip(ids, map(_text, records), strict=True))
        if gone := [token_id for token_id, record in found.items() if not record]:
            await self._store.command("ZREM", _INDEX, *gone)
        tokens = [_token(token_id, record, now) for token_id, record in found.items() if record]
        self._tenants.update((token.token_id, token.tenant) for token in tokens)
        return [token for token in tokens if tenant in ("", token.tenant)]

    async def revoke(self, who: Principal, token_id: str) -> Token:
        """Revoke a token; revoking it again changes nothing.

        Raises:
            NotFoundError: there is none, or its tenant is not visible to the caller.
        """
        async with self._audit.refusals(who, "token.revoke", tenant=who.tenant, target=token_id):
            who.check_role(Role.ADMIN)
            record = await self._read(token_id)
            if not record or not who.sees(record["tenant"]):
                raise NotFoundError(f"token {token_id!r} is not known")
        if "revoked" not in record:
            record["revoked"] = repr(await self._store.now())
            commands: list[Command] = [
                ("HSET", _key(token_id), "revoked", record["revoked"]),
                ("EXPIRE", _key(token_id), KEEP_S),
            ]
            await self._apply(
                who, "token.revoke", token_id, record["tenant"], commands, detail=record["name"]
            )
        return _token(token_id, record, await self._store.now())

    async def authenticate(self, token_id: str, digest: bytes) -> tuple[Principal, float | None]:
        """The principal of a token, and seconds until it expires; None: it does not.

        Raises:
            AuthenticationError: unknown, revoked or expired; the error does not say which.
        """
        record = await self._read(token_id)
        matches = hmac.compare_digest(bytes.fromhex(record.get("digest", _NO_DIGEST)), digest)
        token = _token(token_id, record, await self._store.now()) if record else None
        if token is None or not matches or token.invalid:
            raise AuthenticationError("the token is not valid")
        await self._store.run("token_used", [_key(token_id)], repr(await self._store.now()))
        who = Principal(token_id, token.name, token.tenant, token.role, no_code=token.no_code)
        return who, token.expires_in_s

    async def _apply(
        self,
        who: Principal,
        action: str,
        token_id: str,
        tenant: str,
        commands: list[Command],
        *,
        detail: str,
    ) -> None:
        """Apply a change and its audit entry in one transaction."""
        fields = fields_of(who, action, tenant=tenant, target=token_id, detail=detail)
        *_, entry_id = await self._store.transaction(*commands, self._audit.command(fields))
        self._audit.export(entry_id, fields)

    async def _read(self, token_id: str) -> dict[str, str]:
        (record,) = await self._store.hashes(_key(token_id))
        return _text(record)


def _key(token_id: str) -> str:
    return f"{{access}}:token:{token_id}"


def _text(record: dict[bytes, bytes]) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in record.items()}


def _token(token_id: str, record: dict[str, Any], now: float) -> Token:
    expires, used = record.get("expires"), record.get("used")
    return Token(
        token_id=token_id,
        name=record["name"],
        tenant=record["tenant"],
        role=Role(record["role"]),
        age_s=max(0.0, now - float(record["created"])),
        expires_in_s=float(expires) - now if expires else None,
        used_s=max(0.0, now - float(used)) if used else None,
        revoked="revoked" in record,
        created_by=record["created_by"],
        no_code="no_code" in record,
    )


def _check(name: str, tenant: str, expires_in_s: float | None) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidError(
            f"name: {name!r} is not allowed; up to 63 letters, digits and any of . _ @ - and space"
        )
    if name.casefold() in _RESERVED:
        raise InvalidError(f"name: {name!r} is a name of the installation itself; choose another")
    if tenant != ALL_TENANTS and not _TENANT.fullmatch(tenant):
        raise InvalidError(
            f"tenant: {tenant!r} is not allowed; lower-case letters, digits and -, or * for all"
        )
    if expires_in_s is not None and not 0 < expires_in_s <= _MAX_EXPIRY_S:
        raise InvalidError(f"expires_in_s: {expires_in_s!r} is not allowed; a positive number")
