"""ResourceQuotas on object counts: `pods`, `services`, `count/deployments.apps`."""

from __future__ import annotations

from typing import Any

from kubernetes_double.api.requests.errors import forbidden
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.storage.store import Store

Object = dict[str, Any]
QUOTAS = "resourcequotas"


def check_quotas(store: Store, resource: Resource, new: Object) -> None:
    """Raise the real server's 403 if another object would exceed a quota."""
    namespace = new["metadata"]["namespace"]
    for quota in store.all(QUOTAS, namespace):
        hard = quota.get("spec", {}).get("hard") or {}
        names = [name for name in (resource.storage, f"count/{resource.storage}") if name in hard]
        used = _used(store, resource, namespace)
        over = [name for name in names if used + 1 > int(hard[name])]
        if over:
            parts = (("requested", dict.fromkeys(over, 1)), ("used", dict.fromkeys(over, used)))
            texts = [f"{title}: {_listed(counts)}" for title, counts in parts]
            limited = _listed({name: hard[name] for name in over})
            why = f"exceeded quota: {quota['metadata']['name']}, {', '.join(texts)}, "
            name = new["metadata"]["name"]
            raise forbidden(resource.group, resource.plural, name, f"{why}limited: {limited}")


def _used(store: Store, resource: Resource, namespace: str) -> int:
    """Objects that count against a quota; finished pods do not."""
    over = ("Succeeded", "Failed")
    return sum(
        resource.storage != "pods" or one.get("status", {}).get("phase") not in over
        for one in store.all(resource.storage, namespace)
    )


def _listed(counts: dict[str, Any]) -> str:
    return ",".join(f"{name}={count}" for name, count in sorted(counts.items()))
