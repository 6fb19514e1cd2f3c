"""Deletion with grace periods, finalizers and propagation, and evictions within budgets."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from kubernetes_double.api.requests import errors
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.storage.objects import Objects, Place, later
from kubernetes_double.api.storage.selectors import matches_labels

Object = dict[str, Any]
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
RETURNED = ("pods", "services", "serviceaccounts", "persistentvolumeclaims", "persistentvolumes")
"""Collections whose deletion answers with the object rather than with a Status."""


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    """The options of a deletion, from body and query."""

    grace_s: int | None = None
    propagation: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    dry_run: bool = False


def delete_options(body: Object, query: dict[str, str]) -> DeleteOptions:
    """Parse a DeleteOptions body and the query; the body wins. Raises a 400 or 422."""
    grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    orphan = body.get("orphanDependents", query.get("orphanDependents"))
    propagation = body.get("propagationPolicy") or query.get("propagationPolicy")
    if propagation not in (None, "Foreground", "Background", "Orphan"):
        text = f'Unsupported value: "{propagation}"'
        causes = [errors.cause("FieldValueNotSupported", text, "propagationPolicy")]
        raise errors.invalid("meta.k8s.io", "DeleteOptions", "", causes)
    if orphan is not None and propagation is None:
        propagation = "Orphan" if str(orphan).lower() == "true" else "Background"
    preconditions = body.get("preconditions") or {}
    return DeleteOptions(
        grace_s=None if grace is None else errors.whole("gracePeriodSeconds", grace),
        propagation=propagation,
        uid=preconditions.get("uid"),
        resource_version=preconditions.get("resourceVersion"),
        dry_run=bool(body.get("dryRun") or query.get("dryRun")),
    )


def success(resource: Resource, obj: Object) -> Object:
    """The Status of a completed deletion."""
    details = {
        "name": obj["metadata"]["name"],
        "kind": resource.plural,
        "uid": obj["metadata"]["uid"],
    }
    if resource.group:
        details["group"] = resource.group
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details,
    }


def delete(objects: Objects, place: Place, options: DeleteOptions) -> Object:
    """Remove an object, or mark it for deletion if it has finalizers or a grace period.

    Raises 404, or 409 when a precondition fails.
    """
    old = objects.stored(place)
    _preconditions(place, old["metadata"], options)
    new = _marked(objects, place, old, options)
    if new is None:
        gone = objects.get(place) if options.dry_run else objects.remove(place)
        return gone if place.resource.storage in RETURNED else success(place.resource, gone)
    if new == old or options.dry_run:
        return new
    return objects.store.put(place.resource.storage, place.key, new)


def _preconditions(place: Place, metadata: Object, options: DeleteOptions) -> None:
    pairs = (
        ("UID", options.uid, "uid", "deleted and then recreated"),
        ("ResourceVersion", options.resource_version, "resourceVersion", "modified"),
    )
    for title, wanted, name, what in pairs:
        if wanted and wanted != metadata[name]:
            why = (
                f"the {title} in the precondition ({wanted}) does not match the {title} in record "
                f"({metadata[name]}). The object might have been {what}"
            )
            # The server names the kind here, not the resource.
            raise errors.conflict(place.resource.group, place.resource.kind, place.name, why=why)


def _marked(objects: Objects, place: Place, old: Object, options: DeleteOptions) -> Object | None:
    """The object marked for deletion; None if it can be removed immediately."""
    new = copy.deepcopy(old)
    metadata = new["metadata"]
    metadata["finalizers"] = _finalizers(place.resource, old, options)
    if not metadata["finalizers"]:
        del metadata["finalizers"]
    grace = _grace(place.resource, old, options)
    terminating = place.resource.storage == "namespaces"
    if not grace and not metadata.get("finalizers") and not terminating:
        return None
    first = "deletionTimestamp" not in metadata
    if first or grace < metadata.get("deletionGracePeriodSeconds", 0):
        metadata["deletionTimestamp"] = later(objects.now(), grace)
        metadata["deletionGracePeriodSeconds"] = grace
    if first and "generation" in metadata:
        metadata["generation"] += 1
    if terminating:
        new["status"] = {**new.get("status", {}), "phase": "Terminating"}
    return new


def _grace(resource: Resource, old: Object, options: DeleteOptions) -> int:
    """The grace period in seconds; 0 except for pods that a kubelet may be running."""
    if resource.storage != "pods":
        return 0
    ended = old.get("status", {}).get("phase") in ("Succeeded", "Failed")
    if ended or not old["spec"].get("nodeName"):
        return 0
    default = old["spec"].get("terminationGracePeriodSeconds", 30)
    wanted = default if options.grace_s is None else options.grace_s
    metadata = old["metadata"]
    if "deletionTimestamp" in metadata:
        return min(wanted, metadata.get("deletionGracePeriodSeconds", wanted))
    return wanted


def _finalizers(resource: Resource, old: Object, options: DeleteOptions) -> list[str]:
    present: list[str] = list(old["metadata"].get("finalizers", ()))
    policy = options.propagation
    if policy is None and resource.storage == "jobs.batch":
        policy = "Orphan" if not present else None
    if policy is None:
        return present
    present = [name for name in present if name not in (FOREGROUND, ORPHAN)]
    extra = {"Foreground": [FOREGROUND], "Orphan": [ORPHAN], "Background": []}[policy]
    return [*present, *extra]


def allow_eviction(objects: Objects, pod: Object) -> None:
    """Count an eviction against the budgets of the pod. Raises a 429 if one is exhausted."""
    metadata = pod["metadata"]
    for budget in objects.store.all("poddisruptionbudgets.policy", metadata["namespace"]):
        if not _covers(budget, pod):
            continue
        healthy, needed = budget_state(objects, budget)
        if _ready(pod) and healthy - 1 < needed:
            raise errors.budget_exhausted(budget["metadata"]["name"], needed, healthy)


def _covers(budget: Object, pod: Object) -> bool:
    return matches_labels(budget["spec"].get("selector"), pod["metadata"].get("labels") or {})


def _ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def budget_state(objects: Objects, budget: Object) -> tuple[int, int]:
    """The number of healthy pods of a budget, and the number it needs."""
    namespace = budget["metadata"]["namespace"]
    pods = [pod for pod in objects.store.all("pods", namespace) if _covers(budget, pod)]
    healthy = sum(_ready(pod) for pod in pods)
    spec = budget["spec"]
    if "maxUnavailable" in spec:
        return healthy, len(pods) - _amount(spec["maxUnavailable"], len(pods))
    return healthy, _amount(spec.get("minAvailable", 1), len(pods))


def _amount(value: int | str, total: int) -> int:
    """A number, or a percentage rounded up."""
    if isinstance(value, str) and value.endswith("%"):
        return -(-int(value[:-1]) * total // 100)
    return int(value)
