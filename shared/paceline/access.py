"""Who calls: tokens, roles, tenants, and how a principal travels between services."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from google.protobuf.message import DecodeError

from paceline.errors import AuthenticationError, InvalidError, PermissionDeniedError
from paceline.v1 import access_pb2 as pb

ALL_TENANTS = "*"
METADATA_KEY = "paceline-principal-bin"
# 256 bits of chance, so that one round of sha256 is enough: nobody can try them out.
_SECRET_BYTES = 32
_ID_BYTES = 6
_TOKEN = re.compile(r"pl_([0-9a-f]{12})_[0-9a-f]{64}")


class Role(StrEnum):
    """What a token may do; each role may do what those before it may."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def covers(self, least: Role) -> bool:
        """Whether this role may do what needs `least`."""
        order = list(Role)
        return order.index(self) >= order.index(least)


def role_of(name: str) -> Role:
    """The role of this name.

    Raises:
        InvalidError: there is none.
    """
    try:
        return Role(name)
    except ValueError:
        allowed = ", ".join(Role)
        raise InvalidError(f"role: {name!r} is no role; allowed: {allowed}") from None


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose behalf something is done."""

    token_id: str  # empty: a service, on its own
    name: str
    tenant: str  # ALL_TENANTS: of none in particular
    role: Role
    source: str = ""  # host from which the gateway was called

    def sees(self, tenant: str) -> bool:
        """Whether what belongs to `tenant` exists for this caller."""
        return self.tenant in (ALL_TENANTS, tenant)

    def narrowed(self, tenant: str) -> str | None:
        """The tenant that a question about `tenant` (empty: all) comes down to.

        Empty means all of them; None means that there is nothing that this caller may see.
        """
        if self.tenant == ALL_TENANTS:
            return tenant
        return self.tenant if tenant in ("", self.tenant) else None

    def check_role(self, least: Role) -> None:
        """Raise `PermissionDeniedError` unless the role covers `least`."""
        if not self.role.covers(least):
            raise PermissionDeniedError(f"this needs the role {least}; the token has {self.role}")

    def check_tenant(self, tenant: str) -> None:
        """Raise `PermissionDeniedError` unless this caller may make things of `tenant`."""
        if not self.sees(tenant):
            raise PermissionDeniedError(
                f"tenant: {tenant!r} is not the tenant of this token ({self.tenant!r})"
            )


def service(name: str) -> Principal:
    """A service that acts on its own."""
    return Principal(token_id="", name=name, tenant=ALL_TENANTS, role=Role.ADMIN)


def to_message(principal: Principal) -> pb.Principal:
    """The principal as it travels."""
    return pb.Principal(
        token_id=principal.token_id,
        name=principal.name,
        tenant=principal.tenant,
        role=principal.role,
        source=principal.source,
    )


def from_message(message: pb.Principal) -> Principal:
    """The principal in a message; raises `InvalidError` for a role that does not exist."""
    return Principal(
        token_id=message.token_id,
        name=message.name,
        tenant=message.tenant,
        role=role_of(message.role),
        source=message.source,
    )


def metadata_of(principal: Principal) -> tuple[tuple[str, bytes], ...]:
    """What a service adds to a call that it makes on somebody's behalf."""
    return ((METADATA_KEY, to_message(principal).SerializeToString()),)


def caller(context: Any) -> Principal:
    """On whose behalf a service calls; without metadata it is the service itself.

    Only for what users cannot reach: whoever can, chooses their metadata.

    Raises:
        AuthenticationError: the metadata is not a principal.
    """
    pairs: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    data = dict(pairs).get(METADATA_KEY)
    if data is None:
        return service("service")
    try:
        return from_message(pb.Principal.FromString(bytes(data)))  # pyright: ignore[reportArgumentType]
    except (DecodeError, InvalidError, TypeError):
        raise AuthenticationError(f"{METADATA_KEY} holds no principal") from None


def new_token() -> tuple[str, str]:
    """A fresh token: its id and the whole of it, `pl_ID_SECRET`."""
    token_id = secrets.token_hex(_ID_BYTES)
    return token_id, f"pl_{token_id}_{secrets.token_hex(_SECRET_BYTES)}"


def new_bootstrap() -> str:
    """A fresh token for an installation; has the form of the others, and no id."""
    return f"pl_bootstrap_{secrets.token_hex(_SECRET_BYTES)}"


def token_id_of(token: str) -> str:
    """The id in a token; empty for what has not the shape of one."""
    found = _TOKEN.fullmatch(token)
    return found.group(1) if found else ""


def digest_of(token: str) -> bytes:
    """What is kept of a token, 32 bytes."""
    return hashlib.sha256(token.encode()).digest()


def derived(token: str, name: str) -> str:
    """The token of a part of the installation, made from the bootstrap token; one way only."""
    return f"pl_{name}_{hashlib.sha256(f'paceline/{name}/{token}'.encode()).hexdigest()}"
