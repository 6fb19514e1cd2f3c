"""Authentication by tokens and authorization by the RBAC rules in the store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kubernetes_double.api.requests.errors import forbidden, unauthorized
from kubernetes_double.api.storage.store import Store

Object = dict[str, Any]
RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class Identity:
    """A user or a ServiceAccount."""

    name: str
    groups: tuple[str, ...] = ()


ADMIN = Identity("kubernetes-admin", ("system:masters", "system:authenticated"))
ANONYMOUS = Identity("system:anonymous", ("system:unauthenticated",))


@dataclass(frozen=True, slots=True)
class Access:
    """The attributes of a request for authorization; `path` is set for non-resource requests."""

    verb: str
    group: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""

    @property
    def target(self) -> str:
        """Resource and subresource as in rules, e.g. `pods/log`."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


@dataclass(frozen=True, slots=True)
class Visit:
    """A past request, and whether it was allowed."""

    identity: str
    access: Access
    allowed: bool


@dataclass
class Tokens:
    """Bearer tokens and their identities."""

    store: Store
    admin: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _accounts: dict[str, tuple[str, str, str]] = field(
        default_factory=dict[str, tuple[str, str, str]]
    )

    def issue(self, namespace: str, name: str) -> str | None:
        """A token of a ServiceAccount; None when there is no such account."""
        account = self.store.get("serviceaccounts", (namespace, name))
        if account is None:
            return None
        token = secrets.token_urlsafe(24)
        self._accounts[token] = (namespace, name, account["metadata"]["uid"])
        return token

    def identify(self, authorization: str) -> Identity:
        """The identity for an authorization header. Raises a 401 for an invalid token."""
        if not authorization:
            return ANONYMOUS
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise unauthorized()
        if secrets.compare_digest(token.encode(), self.admin.encode()):
            return ADMIN
        if token not in self._accounts:
            raise unauthorized()
        namespace, name, uid = self._accounts[token]
        account = self.store.get("serviceaccounts", (namespace, name))
        if account is None or account["metadata"]["uid"] != uid:
            raise unauthorized()
        return service_account(namespace, name)


def service_account(namespace: str, name: str) -> Identity:
    """The identity of a ServiceAccount."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
    user = f"system:serviceaccount:{namespace}:{name}"
    return Identity(user, (*groups, "system:authenticated"))


PUBLIC = ("/version", "/version/", "/healthz", "/livez", "/readyz")


@dataclass
class Authorizer:
    """Evaluates Roles, ClusterRoles and their bindings."""

    store: Store

    def check(self, identity: Identity, access: Access) -> None:
        """Raise the real server's 403 unless a rule allows the access."""
        if self.allows(identity, access):
            return
        if access.path:
            why = f'User "{identity.name}" cannot {access.verb} path "{access.path}"'
            raise forbidden("", access.path, "", why)
        where = f'in the namespace "{access.namespace}"'
        where = where if access.namespace else "at the cluster scope"
        why = (
            f'User "{identity.name}" cannot {access.verb} resource "{access.target}" '
            f'in API group "{access.group}" {where}'
        )
        raise forbidden(access.group, access.resource, access.name, why)

    def allows(self, identity: Identity, access: Access) -> bool:
        """Whether any rule bound to the identity covers the access."""
        if "system:masters" in identity.groups:
            return True
        if access.path:
            return access.path in PUBLIC or (
                identity != ANONYMOUS and access.path.startswith(("/api", "/openapi"))
            )
        review = access.resource in ("selfsubjectaccessreviews", "selfsubjectrulesreviews")
        if review and identity != ANONYMOUS:
            return True
        return any(covers(rule, access) for rule in self._rules(identity, access.namespace))

    def _rules(self, identity: Identity, namespace: str) -> Iterator[Object]:
        for binding in self.store.all(f"clusterrolebindings.{RBAC}"):
            yield from self._bound(identity, binding)
        if namespace:
            for binding in self.store.all(f"rolebindings.{RBAC}", namespace):
                yield from self._bound(identity, binding)

    def _bound(self, identity: Identity, binding: Object) -> Iterator[Object]:
        namespace = binding["metadata"].get("namespace", "")
        if not any(_is(identity, one, namespace) for one in binding.get("subjects") or ()):
            return
        reference = binding["roleRef"]
        if reference["kind"] == "ClusterRole":
            role = self.store.get(f"clusterroles.{RBAC}", ("", reference["name"]))
        else:
            role = self.store.get(f"roles.{RBAC}", (namespace, reference["name"]))
        yield from (role or {}).get("rules") or ()


def _is(identity: Identity, subject: Object, namespace: str) -> bool:
    match subject["kind"]:
        case "ServiceAccount":
            home = subject.get("namespace") or namespace
            return identity.name == f"system:serviceaccount:{home}:{subject['name']}"
        case "Group":
            return subject["name"] in identity.groups
        case _:
            return subject["name"] == identity.name


def covers(rule: Object, access: Access) -> bool:
    """Whether one PolicyRule allows one access to a resource."""
    names = rule.get("resourceNames") or ()
    return (
        _any(rule.get("verbs"), access.verb)
        and _any(rule.get("apiGroups"), access.group)
        and _resource(rule.get("resources") or (), access)
        and (not names or access.name in names)
    )


def _any(allowed: list[str] | None, wanted: str) -> bool:
    return "*" in (allowed or ()) or wanted in (allowed or ())


def _resource(allowed: list[str] | tuple[()], access: Access) -> bool:
    wild = f"*/{access.subresource}" if access.subresource else "*"
    return any(one in ("*", wild, access.target) for one in allowed)
