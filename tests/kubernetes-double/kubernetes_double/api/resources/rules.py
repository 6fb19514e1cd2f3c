"""Validation beyond the schema: names, selectors, immutable fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from kubernetes_double.api.requests.errors import cause
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.storage.selectors import matches_labels

Object = dict[str, Any]
Causes = list[Object]

SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
SERVICE = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
KEY = re.compile(r"^([a-z0-9.-]{1,253}/)?([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]$")
PATH_NAMES = ("roles", "rolebindings", "clusterroles", "clusterrolebindings")


def _bad(path: str, value: Any, why: str) -> Object:
    message = f"Invalid value: {json.dumps(value, sort_keys=True)}: {why}"
    return cause("FieldValueInvalid", message, path)


def check_names(resource: Resource, obj: Object) -> Causes:
    """Check the name, `generateName`, label keys and label values."""
    metadata = obj["metadata"]
    stem = metadata.get("generateName", "")
    # A trailing dash is fine, since letters are appended.
    whole = f"{stem[:-2]}a" if len(stem) > 1 and stem.endswith("-") else stem
    generated = _check_name(resource, whole, "metadata.generateName") if whole else []
    named = _check_name(resource, metadata["name"])
    return [*generated, *named, *_check_labels(metadata.get("labels") or {})]


def _check_name(resource: Resource, name: str, path: str = "metadata.name") -> Causes:
    if resource.plural in PATH_NAMES:
        wrong = "/" in name or "%" in name or name in (".", "..")
        return [_bad(path, name, "may not contain '/' or '%'")] if wrong else []
    if resource.plural == "services" and not resource.group:
        pattern, most, what = SERVICE, 63, "a DNS-1035 label"
    elif resource.plural == "namespaces" and not resource.group:
        pattern, most, what = LABEL, 63, "a lowercase RFC 1123 label"
    else:
        pattern, most, what = SUBDOMAIN, 253, "a lowercase RFC 1123 subdomain"
    if len(name) > most:
        return [_bad(path, name, f"must be no more than {most} characters")]
    if not pattern.match(name):
        why = f"{what} must consist of lower case alphanumeric characters, '-' or '.'"
        return [_bad(path, name, why)]
    return []


def _check_labels(labels: dict[str, str]) -> Causes:
    why = "a valid label is empty or consists of alphanumeric characters, '-', '_' or '.'"
    keys = [
        _bad("metadata.labels", key, "name part is wrong") for key in labels if not KEY.match(key)
    ]
    values = [
        _bad("metadata.labels", value, why)
        for value in labels.values()
        if len(value) > 63 or not VALUE.match(value)
    ]
    return [*keys, *values]


def check_selector(resource: Resource, obj: Object) -> Causes:
    """Check that the selector of a workload matches its own template."""
    if resource.group != "apps" or "template" not in obj.get("spec", {}):
        return []
    selector = obj["spec"].get("selector") or {}
    if not selector.get("matchLabels") and not selector.get("matchExpressions"):
        path = "spec.selector"
        return [_bad(path, selector, "empty selector is invalid for " + resource.kind.lower())]
    labels = obj["spec"]["template"].get("metadata", {}).get("labels") or {}
    if matches_labels(selector, labels):
        return []
    why = "`selector` does not match template `labels`"
    return [_bad("spec.template.metadata.labels", labels, why)]


FROZEN: dict[str, tuple[str, ...]] = {
    "deployments.apps": ("spec.selector",),
    "replicasets.apps": ("spec.selector",),
    "daemonsets.apps": ("spec.selector",),
    "jobs.batch": (
        *("spec.selector", "spec.template.spec", "spec.template.metadata"),
        "spec.completionMode",
    ),
    "secrets": ("type",),
    "rolebindings.rbac.authorization.k8s.io": ("roleRef",),
    "clusterrolebindings.rbac.authorization.k8s.io": ("roleRef",),
    "priorityclasses.scheduling.k8s.io": ("value", "preemptionPolicy"),
}
"""Immutable fields by collection."""

STATEFUL_SET = (
    *("replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit"),
    *("persistentVolumeClaimRetentionPolicy", "minReadySeconds"),
)
POD = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds")
CLAIM = ("resources", "volumeName", "volumeAttributesClassName", "storageClassName")


def _at(obj: Object, path: str) -> Any:
    found: Any = obj
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _without(spec: Object, names: tuple[str, ...]) -> Object:
    return {name: value for name, value in spec.items() if name not in names}


def _stateful_set(old: Object, new: Object) -> Causes:
    if _without(old["spec"], STATEFUL_SET) == _without(new["spec"], STATEFUL_SET):
        return []
    names = ", ".join(f"'{name}'" for name in STATEFUL_SET[:-1])
    message = (
        f"Forbidden: updates to statefulset spec for fields other than {names} "
        f"and '{STATEFUL_SET[-1]}' are forbidden"
    )
    return [cause("FieldValueForbidden", message, "spec")]


def _pod_shape(spec: Object) -> Object:
    lists = {
        name: [_without(one, ("image",)) for one in spec.get(name, ())]
        for name in ("containers", "initContainers")
    }
    return {**_without(spec, (*POD, "nodeName", "ephemeralContainers")), **lists}


def _pod(old: Object, new: Object) -> Causes:
    moved = old["spec"].get("nodeName") != new["spec"].get("nodeName")
    if _pod_shape(old["spec"]) == _pod_shape(new["spec"]) and not moved:
        return []
    message = (
        "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
        "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` "
        "(only additions to existing tolerations),`spec.terminationGracePeriodSeconds`"
    )
    return [cause("FieldValueForbidden", message, "spec")]


def _claim(old: Object, new: Object) -> Causes:
    if _without(old["spec"], CLAIM) == _without(new["spec"], CLAIM):
        return []
    message = "Forbidden: spec is immutable after creation except resources.requests"
    return [cause("FieldValueForbidden", message, "spec")]


def _service(old: Object, new: Object) -> Causes:
    before, after = old["spec"].get("clusterIP"), new["spec"].get("clusterIP")
    external = "ExternalName" in (old["spec"].get("type"), new["spec"].get("type"))
    if not before or before == after or external:
        return []
    return [_bad("spec.clusterIPs[0]", after, "may not change once set")]


def _sealed(old: Object, new: Object) -> Causes:
    parts = ("data", "binaryData", "immutable")
    if not old.get("immutable") or all(old.get(p) == new.get(p) for p in parts):
        return []
    message = "Forbidden: field is immutable when `immutable` is set"
    return [cause("FieldValueForbidden", message, "data")]


def _job(old: Object, new: Object) -> Causes:
    before, after = old["spec"], new["spec"]
    if before.get("completions") == after.get("completions"):
        return []
    indexed = after.get("completionMode") == "Indexed"
    if indexed and after.get("completions") == after.get("parallelism"):
        return []
    return [_bad("spec.completions", after.get("completions"), "field is immutable")]


CHANGES: dict[str, Callable[[Object, Object], Causes]] = {
    "statefulsets.apps": _stateful_set,
    "pods": _pod,
    "persistentvolumeclaims": _claim,
    "services": _service,
    "secrets": _sealed,
    "configmaps": _sealed,
    "jobs.batch": _job,
}


def check_change(resource: Resource, old: Object, new: Object) -> Causes:
    """Check that an update changes no immutable field."""
    frozen = [
        _bad(path, _at(new, path), "field is immutable")
        for path in FROZEN.get(resource.storage, ())
        if _at(old, path) != _at(new, path)
    ]
    extra = CHANGES.get(resource.storage)
    return [*frozen, *_finalizers(old, new), *(extra(old, new) if extra else ())]


def _finalizers(old: Object, new: Object) -> Causes:
    """Check that no finalizers are added to an object that is being deleted.

    The server checks it for every kind, and each kind's own rules do so once more.
    """
    before, after = (set(one["metadata"].get("finalizers") or ()) for one in (old, new))
    if "deletionTimestamp" not in old["metadata"] or after <= before:
        return []
    names = ", ".join(json.dumps(name) for name in sorted(after - before))
    message = (
        "Forbidden: no new finalizers can be added if the object is being deleted, "
        f"found new finalizers []string{{{names}}}"
    )
    return 2 * [cause("FieldValueForbidden", message, "metadata.finalizers")]
