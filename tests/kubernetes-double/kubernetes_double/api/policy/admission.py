"""Admission of new objects: namespaces, service accounts, cluster addresses."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any

from kubernetes_double.api.policy.quotas import check_quotas
from kubernetes_double.api.requests.errors import cause, forbidden, not_found
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.storage.store import Store

Object = dict[str, Any]
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass
class Admission:
    """Completes or rejects new objects."""

    store: Store
    addresses: IPv4Network = field(default_factory=lambda: IPv4Network("10.96.0.0/16"))
    _next: int = 10

    def on_create(self, resource: Resource, new: Object) -> None:
        """Complete a new object. Raises 404 (no namespace) or 403."""
        if resource.namespaced:
            self._namespace(resource, new)
        if resource.storage == "pods":
            self._pod(new)
        if resource.storage == "services":
            self._service(new["spec"])
        if resource.namespaced:
            check_quotas(self.store, resource, new)

    def _namespace(self, resource: Resource, new: Object) -> None:
        name = new["metadata"]["namespace"]
        found = self.store.get("namespaces", ("", name))
        if found is None:
            raise not_found("", "namespaces", name)
        if found["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {name} because it is being terminated"
            text = f"namespace {name} is being terminated"
            causes = [cause("NamespaceTerminating", text, "metadata.namespace")]
            raise forbidden(resource.group, resource.plural, new["metadata"]["name"], why, causes)

    def _pod(self, new: Object) -> None:
        spec, namespace = new["spec"], new["metadata"]["namespace"]
        name = spec.setdefault("serviceAccountName", "default")
        spec.setdefault("serviceAccount", name)
        account = self.store.get("serviceaccounts", (namespace, name))
        if account is None:
            why = (
                f"error looking up service account {namespace}/{name}: "
                f'serviceaccount "{name}" not found'
            )
            raise forbidden("", "pods", new["metadata"]["name"], why)
        mount = spec.get(
            "automountServiceAccountToken", account.get("automountServiceAccountToken", True)
        )
        if mount:
            _mount_token(spec)
        _tolerate(spec)

    def _service(self, spec: Object) -> None:
        if spec.get("type") == "ExternalName":
            return
        if "clusterIP" not in spec:
            spec["clusterIP"] = str(self.addresses[self._next])
            self._next += 1
        spec.setdefault("clusterIPs", [spec["clusterIP"]])


def _mount_token(spec: Object) -> None:
    """Mount the token, like the ServiceAccount admission plug-in."""
    containers = (*spec.get("containers", ()), *spec.get("initContainers", ()))
    bare = [
        one
        for one in containers
        if all(mount["mountPath"] != TOKEN_FOLDER for mount in one.get("volumeMounts", ()))
    ]
    if not bare:
        return
    name = f"kube-api-access-{secrets.token_hex(3)[:5]}"
    for one in bare:
        mount = {"name": name, "mountPath": TOKEN_FOLDER, "readOnly": True}
        one.setdefault("volumeMounts", []).append(mount)
    place = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    authority = [{"key": "ca.crt", "path": "ca.crt"}]
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": authority}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": place}]}},
    ]
    volume = {"name": name, "projected": {"defaultMode": 0o644, "sources": sources}}
    spec.setdefault("volumes", []).append(volume)


def _tolerate(spec: Object) -> None:
    """Add tolerations, like the DefaultTolerationSeconds plug-in."""
    tolerations: list[Object] = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if all(one.get("key", key) != key for one in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )
