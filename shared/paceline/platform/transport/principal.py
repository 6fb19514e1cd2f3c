"""The principal behind a call: its token, role and tenant, and its form in gRPC metadata."""

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
from paceline.platform import wire
from paceline.v1 import access_pb2 as pb

ALL_TENANTS = "*"
METADATA_KEY = "paceline-principal-bin"
# 256 random bits cannot be guessed, so a single unsalted sha256 is a safe digest to store.
_SECRET_BYTES = 32
_ID_BYTES = 6
_TOKEN = re.compile(r"pl_([0-9a-f]{12})_[0-9a-f]{64}")


class Role(StrEnum):
    """What a token may do; each role includes those before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def covers(self, required: Role) -> bool:
        """Whether this role includes `required`."""
        order = list(Role)
        return order.index(self) >= order.index(required)


def role_of(name: str) -> Role:
    """Parse a role.

    Raises:
        InvalidError: no role has this name.
    """
    try:
        return Role(name)
    except ValueError:
        allowed = ", ".join(Role)
        raise InvalidError(f"role: {name!r} is not a role; allowed: {allowed}") from None


@dataclass(frozen=True, slots=True)
class Principal:
    """The user or service on whose behalf a request is made."""

    token_id: str  # empty: a service acting on its own behalf
    name: str
    tenant: str  # or ALL_TENANTS
    role: Role
    source: str = ""  # host that called the gateway
    no_code: bool = False  # its jobs may bring no code

    def sees(self, tenant: str) -> bool:
        """Whether resources of `tenant` are visible to this principal."""
        return self.tenant in (ALL_TENANTS, tenant)

    def narrowed(self, tenant: str) -> str | None:
        """The tenant filter to apply when the caller asks for `tenant` (empty: all tenants).

        An empty result applies no filter; None means that nothing is visible to the caller.
        """
        if self.tenant == ALL_TENANTS:
            return tenant
        return self.tenant if tenant in ("", self.tenant) else None

    def check_role(self, required: Role) -> None:
        """Raise `PermissionDeniedError` unless the role covers `required`."""
        if not self.role.covers(required):
            raise PermissionDeniedError(
                f"this needs the role {required}; the token has {self.role}"
            )

    def check_code(self) -> None:
        """Raise `PermissionDeniedError` unless its jobs may bring code."""
        if self.no_code:
            raise PermissionDeniedError(
                "code: jobs of this token may bring none; use rewards and environments that are "
                "installed, or a token that was created without --no-code"
            )

    def check_tenant(self, tenant: str) -> None:
        """Raise `PermissionDeniedError` unless the principal may act in `tenant`."""
        if not self.sees(tenant):
            raise PermissionDeniedError(
                f"tenant: {tenant!r} is not the tenant of this token ({self.tenant!r})"
            )


def service(name: str) -> Principal:
    """The principal of a service acting on its own behalf."""
    return Principal(token_id="", name=name, tenant=ALL_TENANTS, role=Role.ADMIN)


def principal_metadata(principal: Principal) -> tuple[tuple[str, bytes], ...]:
    """Metadata of a call that a service makes on behalf of `principal`."""
    return ((METADATA_KEY, wire.to_proto(principal, pb.Principal).SerializeToString()),)


def caller(context: Any) -> Principal:
    """The principal in the metadata of an RPC; without one, the calling service itself.

    Trust it only on ports that users cannot reach: a user could send any metadata.

    Raises:
        AuthenticationError: the metadata cannot be parsed.
    """
    pairs: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    data = dict(pairs).get(METADATA_KEY)
    if data is None:
        return service("service")
    try:
        message = pb.Principal.FromString(bytes(data))  # pyright: ignore[reportArgumentType]
        return wire.from_proto(message, Principal)
    except (DecodeError, InvalidError, TypeError):
        raise AuthenticationError(f"{METADATA_KEY} does not contain a principal") from None


def new_token() -> tuple[str, str]:
    """A new random token: its id and its full text, `pl_ID_SECRET`."""
    token_id = secrets.token_hex(_ID_BYTES)
    return token_id, f"pl_{token_id}_{secrets.token_hex(_SECRET_BYTES)}"


def new_bootstrap_token() -> str:
    """A new random bootstrap token for an installation; it has no id."""
    return f"pl_bootstrap_{secrets.token_hex(_SECRET_BYTES)}"


def token_id_of(token: str) -> str:
    """The id in a token; empty if it is malformed."""
    found = _TOKEN.fullmatch(token)
    return found.group(1) if found else ""


def token_digest(token: str) -> bytes:
    """The sha256 of a token, 32 bytes: all that is stored of it."""
    return hashlib.sha256(token.encode()).digest()


def derived_token(token: str, name: str) -> str:
    """The token of a component, derived one-way from the bootstrap token."""
    return f"pl_{name}_{hashlib.sha256(f'paceline/{name}/{token}'.encode()).hexdigest()}"
