"""Validation of pods, pod templates and services beyond the schema: common mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from kubernetes_double.api.requests.errors import cause
from kubernetes_double.api.resources.registry import Resource

Object = dict[str, Any]

TEMPLATES = {
    "pods": ("spec", ("Always", "OnFailure", "Never")),
    "deployments.apps": ("spec.template.spec", ("Always",)),
    "replicasets.apps": ("spec.template.spec", ("Always",)),
    "statefulsets.apps": ("spec.template.spec", ("Always",)),
    "daemonsets.apps": ("spec.template.spec", ("Always",)),
    "jobs.batch": ("spec.template.spec", ("OnFailure", "Never")),
    "cronjobs.batch": ("spec.jobTemplate.spec.template.spec", ("OnFailure", "Never")),
}
"""Path of the pod spec, and the restart policies allowed there."""
PULL = ("Always", "IfNotPresent", "Never")
DNS = ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
SERVICES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
MAX_PORT_NAME = 15


def check_workload(resource: Resource, obj: Object) -> list[Object]:
    """Causes of rejection, for kinds with pods or ports."""
    if resource.storage == "services":
        return list(_service(obj.get("spec", {})))
    if resource.storage not in TEMPLATES:
        return []
    path, policies = TEMPLATES[resource.storage]
    spec: Any = obj
    for name in path.split("."):
        spec = spec.get(name, {})
    claims = [one["metadata"]["name"] for one in obj["spec"].get("volumeClaimTemplates", ())]
    return list(_pod(spec, path, policies, claims))


def _among(value: Any, allowed: tuple[str, ...], path: str) -> Iterator[Object]:
    if value is not None and value not in allowed:
        names = ", ".join(json.dumps(one) for one in sorted(allowed))
        message = f"Unsupported value: {json.dumps(value)}: supported values: {names}"
        yield cause("FieldValueNotSupported", message, path)


def _once(names: Iterable[Any], path: str) -> Iterator[Object]:
    seen: set[Any] = set()
    for index, name in enumerate(names):
        if name in seen:
            message = f"Duplicate value: {json.dumps(name)}"
            yield cause("FieldValueDuplicate", message, f"{path}[{index}].name")
        seen.add(name)


def _pod(spec: Object, path: str, policies: tuple[str, ...], claims: list[str]) -> Iterator[Object]:
    yield from _among(spec.get("restartPolicy"), policies, f"{path}.restartPolicy")
    yield from _among(spec.get("dnsPolicy"), DNS, f"{path}.dnsPolicy")
    volumes = [one.get("name") for one in spec.get("volumes", ())]
    yield from _once(volumes, f"{path}.volumes")
    for kind in ("initContainers", "containers"):
        place = f"{path}.{kind}"
        yield from _once((one.get("name") for one in spec.get(kind, ())), place)
        for index, one in enumerate(spec.get(kind, ())):
            yield from _container(one, f"{place}[{index}]", {*volumes, *claims})
    if not spec.get("containers"):
        yield cause("FieldValueRequired", "Required value", f"{path}.containers")


def _container(one: Object, path: str, volumes: set[Any]) -> Iterator[Object]:
    yield from _among(one.get("imagePullPolicy"), PULL, f"{path}.imagePullPolicy")
    if not one.get("image"):
        yield cause("FieldValueRequired", "Required value", f"{path}.image")
    for index, mount in enumerate(one.get("volumeMounts", ())):
        if mount.get("name") not in volumes:
            message = f"Not found: {json.dumps(mount.get('name'))}"
            yield cause("FieldValueNotFound", message, f"{path}.volumeMounts[{index}].name")
    for index, port in enumerate(one.get("ports", ())):
        yield from _port_name(port, f"{path}.ports[{index}].name")


def _port_name(port: Object, path: str) -> Iterator[Object]:
    name = port.get("name", "")
    if len(name) > MAX_PORT_NAME:
        message = f"Invalid value: {json.dumps(name)}: must be no more than 15 characters"
        yield cause("FieldValueInvalid", message, path)


def _service(spec: Object) -> Iterator[Object]:
    yield from _among(spec.get("type"), SERVICES, "spec.type")
    ports = spec.get("ports", [])
    if not ports and spec.get("type") != "ExternalName" and spec.get("clusterIP") != "None":
        yield cause("FieldValueRequired", "Required value", "spec.ports")
    if len(ports) < 2:
        return
    for index, port in enumerate(ports):
        if not port.get("name"):
            yield cause("FieldValueRequired", "Required value", f"spec.ports[{index}].name")
    yield from _once((port.get("name") for port in ports), "spec.ports")
