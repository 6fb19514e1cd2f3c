"""Parses method and URL into verb, resource, object and subresource."""

from __future__ import annotations

from dataclasses import dataclass

from kubernetes_double.api.policy.access import Access
from kubernetes_double.api.requests.errors import not_allowed
from kubernetes_double.api.resources.kinds import Kinds
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.storage.objects import Place

ONE = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "POST": "create"}
MANY = {"GET": "list", "POST": "create", "DELETE": "deletecollection"}


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a path under /api or /apis; `name` is empty for a collection."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    def access(self, verb: str) -> Access:
        """The attributes for authorization."""
        return Access(verb, self.group, self.plural, self.subresource, self.namespace, self.name)

    def place(self, resource: Resource) -> Place:
        """The object; a namespace in the path is ignored for a cluster-scoped kind."""
        namespace = self.namespace if resource.namespaced else ""
        return Place(resource, namespace, self.name, self.subresource)

    def resource(self, kinds: Kinds) -> Resource:
        """The resource of the path. Raises a 404."""
        return kinds.resource(self.group, self.version, self.plural)


def parse(path: str) -> Target | None:
    """Parse a path; None if it names no resource (discovery, health)."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    elif rest[0] == "namespaces" and len(rest) > 1:
        namespace = rest[1]
    plural, name, door = [*rest, "", "", ""][:3]
    return Target(group, version, plural, namespace, name, door)


def verb_of(method: str, target: Target, query: dict[str, str]) -> str:
    """The verb as RBAC names it. Raises a 405."""
    watching = query.get("watch", "").lower() in ("1", "true")
    if method == "GET" and watching and not target.subresource:
        return "watch"
    verbs = ONE if target.name else MANY
    if method not in verbs or (method == "POST" and target.name and not target.subresource):
        raise not_allowed(method)
    return verbs[method]
