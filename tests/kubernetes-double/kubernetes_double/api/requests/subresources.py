"""Subresources: scale, eviction, binding, token, and access reviews."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kubernetes_double.api.policy.access import Access, Authorizer, Identity, Tokens
from kubernetes_double.api.policy.deletion import allow_eviction, delete, delete_options
from kubernetes_double.api.requests import errors
from kubernetes_double.api.storage.objects import Objects, Place, WriteOptions, stamp

Object = dict[str, Any]


def _selector_text(selector: Object) -> str:
    equal = [f"{key}={value}" for key, value in selector.get("matchLabels", {}).items()]
    sets: list[str] = []
    for one in selector.get("matchExpressions", ()):
        values = ",".join(one.get("values", ()))
        match one["operator"]:
            case "In":
                sets.append(f"{one['key']} in ({values})")
            case "NotIn":
                sets.append(f"{one['key']} notin ({values})")
            case "Exists":
                sets.append(one["key"])
            case _:
                sets.append(f"!{one['key']}")
    return ",".join([*equal, *sets])


def scale_of(obj: Object) -> Object:
    """The `autoscaling/v1` Scale of a workload; omits zero replicas like the real server."""
    names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    metadata = {name: obj["metadata"][name] for name in names if name in obj["metadata"]}
    spec, status = obj.get("spec", {}), obj.get("status", {})
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": spec["replicas"]} if spec.get("replicas") else {},
        "status": {
            "replicas": status.get("replicas", 0),
            "selector": _selector_text(spec.get("selector") or {}),
        },
    }


def rescale(
    objects: Objects, place: Place, change: Callable[[Object], Object], options: WriteOptions
) -> Object:
    """Replace or patch the Scale; only the number of replicas is written to the workload."""

    def to_workload(workload: Object) -> Object:
        scale = change(scale_of(workload))
        version = scale["metadata"].get("resourceVersion")
        replicas = scale.get("spec", {}).get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            text = f"Invalid value: {replicas}: must be greater than or equal to 0"
            causes = [errors.cause("FieldValueInvalid", text, "spec.replicas")]
            raise errors.invalid("autoscaling", "Scale", place.name, causes)
        workload["spec"]["replicas"] = replicas
        workload["metadata"]["resourceVersion"] = version
        return workload

    main = Place(place.resource, place.namespace, place.name)
    return scale_of(objects.modify(main, to_workload, options))


def evict(objects: Objects, place: Place, body: Object) -> Object:
    """Delete a pod if its disruption budgets allow it. Raises 404 or 429."""
    pod = objects.stored(place)
    ended = pod.get("status", {}).get("phase") in ("Pending", "Succeeded", "Failed")
    if not ended and "deletionTimestamp" not in pod["metadata"]:
        allow_eviction(objects, pod)
    delete(objects, place, delete_options(body.get("deleteOptions") or {}, {}))
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def bind(objects: Objects, place: Place, body: Object, options: WriteOptions) -> Object:
    """Bind a pod to a node. Raises 404 or 409."""
    node = body.get("target", {}).get("name", "")

    def to_node(pod: Object) -> Object:
        if pod["spec"].get("nodeName"):
            why = f"pod {place.name} is already assigned to node {pod['spec']['nodeName']!r}"
            raise errors.conflict("", "pods/binding", place.name, why)
        pod["spec"]["nodeName"] = node
        return pod

    new = copy.deepcopy(to_node(copy.deepcopy(objects.stored(place))))
    condition = {
        "type": "PodScheduled",
        "status": "True",
        "lastTransitionTime": stamp(objects.now()),
    }
    status = new.setdefault("status", {})
    status["conditions"] = [*status.get("conditions", ()), condition]
    if not options.dry_run:
        objects.settle(place, new)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def request_token(objects: Objects, tokens: Tokens, place: Place, body: Object) -> Object:
    """Answer a TokenRequest; the token is valid as long as the account exists. Raises a 404."""
    objects.stored(place)
    spec: Object = {"audiences": [], "expirationSeconds": 3600, **(body.get("spec") or {})}
    until = stamp(objects.now() + timedelta(seconds=spec["expirationSeconds"]))
    token = tokens.issue(place.namespace, place.name)
    return {
        "kind": "TokenRequest",
        "apiVersion": "authentication.k8s.io/v1",
        "metadata": {"name": place.name, "namespace": place.namespace},
        "spec": spec,
        "status": {"token": token, "expirationTimestamp": until},
    }


@dataclass
class Reviews:
    """Answers SelfSubjectAccessReview and SubjectAccessReview requests."""

    authorizer: Authorizer

    def answer(self, kind: str, identity: Identity, body: Object) -> Object:
        """The review with its status filled in."""
        spec: Object = body.get("spec") or {}
        if kind == "SubjectAccessReview":
            identity = Identity(spec.get("user", ""), tuple(spec.get("groups") or ()))
        asked = spec.get("resourceAttributes")
        if asked:
            names = ("verb", "group", "resource", "subresource", "namespace", "name")
            access = Access(**{name: asked.get(name, "") for name in names})
        else:
            other = spec.get("nonResourceAttributes") or {}
            access = Access(other.get("verb", ""), path=other.get("path", "/"))
        allowed = self.authorizer.allows(identity, access)
        status = {"allowed": allowed, "reason": "" if allowed else "no rule allows it"}
        version = "authorization.k8s.io/v1"
        return {"metadata": {}, **body, "kind": kind, "apiVersion": version, "status": status}
