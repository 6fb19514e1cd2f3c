"""EndpointSlices: the addresses of the pods behind each Service, one slice per Service."""

from __future__ import annotations

from collections.abc import Iterable

from kubernetes_double.nodes.client import POD, SERVICE, SLICE, Kind, Object
from kubernetes_double.nodes.informer import Informer, Key, key_of, matches, owner_reference
from kubernetes_double.nodes.loop import Loop, changed
from kubernetes_double.nodes.workloads.pods import is_leaving, is_over, is_ready

_SERVICE_NAME = "kubernetes.io/service-name"


class Endpoints:
    """The controller of EndpointSlices."""

    def __init__(self, informer: Informer) -> None:
        self._informer = informer
        self.loop = Loop(informer, sync=self.sync, keys_of=self._keys_of)

    async def sync(self, key: Key) -> None:
        """Write the slice of one Service."""
        service = self._informer.get(SERVICE, key)
        if service is None or not service["spec"].get("selector"):
            return
        selector = {"matchLabels": service["spec"]["selector"]}
        pods = [
            pod
            for pod in self._informer.all(POD, key[0])
            if matches(selector, pod["metadata"].get("labels")) and not is_over(pod)
        ]
        reached = [pod for pod in pods if pod.get("status", {}).get("podIP")]
        content: Object = {
            "endpoints": [_endpoint(service, pod) for pod in reached],
            "ports": [_port(port, reached) for port in service["spec"].get("ports", [])],
        }
        held = self._informer.get(SLICE, key)
        if held is None:
            metadata = {
                "name": key[1],
                "namespace": key[0],
                "labels": {_SERVICE_NAME: key[1]},
                "ownerReferences": owner_reference(SERVICE, service),
            }
            head = {"apiVersion": SLICE.api_version, "kind": SLICE.name, "metadata": metadata}
            await self._informer.create(SLICE, {**head, "addressType": "IPv4", **content})
        elif changed(held, content):
            await self._informer.patch(SLICE, held, content)

    def _keys_of(self, kind: Kind, item: Object) -> Iterable[Key]:
        if kind in (SERVICE, SLICE):
            return [key_of(item)]
        if kind is not POD:
            return []
        labels = item["metadata"].get("labels")
        services = self._informer.all(SERVICE, item["metadata"]["namespace"])
        return [
            key_of(service)
            for service in services
            if matches({"matchLabels": service["spec"].get("selector") or {"": ""}}, labels)
        ]


def _endpoint(service: Object, pod: Object) -> Object:
    serving = is_ready(pod) or bool(service["spec"].get("publishNotReadyAddresses"))
    metadata, spec = pod["metadata"], pod["spec"]
    made: Object = {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": serving, "serving": serving, "terminating": is_leaving(pod)},
        "nodeName": spec.get("nodeName", ""),
        "targetRef": {
            "kind": "Pod",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }
    if spec.get("hostname") and spec.get("subdomain") == service["metadata"]["name"]:
        made["hostname"] = spec["hostname"]
    return made


def _port(port: Object, pods: list[Object]) -> Object:
    """A port with its number in the pods; a name is looked up in the first pod."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, str):
        known = [p for pod in pods for c in pod["spec"]["containers"] for p in c.get("ports", [])]
        target = next((p["containerPort"] for p in known if p.get("name") == target), port["port"])
    return {
        "name": port.get("name", ""),
        "port": target,
        "protocol": port.get("protocol", "TCP"),
    }
