"""Label and field selectors: strings to predicates over objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kubernetes_double.api.requests.errors import bad_request

Object = dict[str, Any]
Predicate = Callable[[Object], bool]

_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s*\(([^()]*)\)\s*$")
_EQUAL = re.compile(r"^\s*([^\s!=]+)\s*(==|=|!=)\s*([^\s!=]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([^\s!=(),]+)\s*$")

FIELDS: dict[str, tuple[str, ...]] = {
    "pods": (
        *("spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName"),
        *("spec.hostNetwork", "status.phase", "status.podIP", "status.nominatedNodeName"),
    ),
    "events": (
        *(f"involvedObject.{name}" for name in ("kind", "namespace", "name", "uid")),
        *(
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
        ),
        *("reason", "reportingComponent", "source", "type"),
    ),
    "secrets": ("type",),
    "namespaces": ("status.phase",),
    "nodes": ("spec.unschedulable",),
    "jobs.batch": ("status.successful",),
    "replicasets.apps": ("status.replicas",),
    "services": ("spec.clusterIP", "spec.type"),
}
"""Field selectors beyond metadata.name and metadata.namespace, by collection."""


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    return [part for part in re.split(r",(?![^()]*\))", text) if part.strip()]


def _label_term(text: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.match(text):
        key, operator, rest = found.groups()
        values = {value.strip() for value in rest.split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _EQUAL.match(text):
        key, operator, value = found.groups()
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _EXISTS.match(text):
        negated, key = found.groups()
        return lambda labels: (key in labels) is not bool(negated)
    raise bad_request(f"unable to parse requirement: {text!r}: want key, !key, key=v or key in (v)")


def label_selector(text: str) -> Predicate:
    """`app=x,tier in (a,b),!canary`. Raises a 400 for what cannot be read."""
    terms = [_label_term(part) for part in _split(text)]

    def matches(obj: Object) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(term(labels) for term in terms)

    return matches


def _value(obj: Object, path: str) -> str:
    found: Any = obj
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if path == "source" and isinstance(found, dict):
        found = found.get("component")
    if isinstance(found, bool):
        return str(found).lower()
    return "" if found is None else str(found)


def _field_term(text: str, allowed: tuple[str, ...]) -> Predicate:
    found = re.match(r"^\s*([^\s!=]+)\s*(==|=|!=)\s*(.*?)\s*$", text)
    if not found:
        raise bad_request(f"invalid field selector: {text!r}: want path=value or path!=value")
    path, operator, value = found.groups()
    if path not in allowed:
        message = f'Unable to find "{path}": field label not supported: {path}'
        raise bad_request(message)
    return lambda obj: (_value(obj, path) == value) is (operator != "!=")


def field_selector(text: str, storage: str, extra: tuple[str, ...] = ()) -> Predicate:
    """`metadata.name=x,status.phase!=Failed`; `extra`: the selectable fields of a custom kind.

    Raises a 400 for a field that the collection cannot be selected by.
    """
    allowed = ("metadata.name", "metadata.namespace", *FIELDS.get(storage, ()), *extra)
    terms = [_field_term(part, allowed) for part in _split(text)]
    return lambda obj: all(term(obj) for term in terms)


def matches_labels(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector object (`matchLabels`, `matchExpressions`); None matches nothing."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_expression(one, labels) for one in selector.get("matchExpressions") or [])


def _expression(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = one["key"], one.get("values") or []
    match one["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels
