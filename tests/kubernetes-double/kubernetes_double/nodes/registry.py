"""Node objects for the simulated machines."""

from __future__ import annotations

from kubernetes.aio.client import ApiException

from kubernetes_double.nodes.client import NODE
from kubernetes_double.nodes.informer import Informer
from kubernetes_double.nodes.settings import Node
from kubernetes_double.nodes.times import now

_CONFLICT = 409


class Registry:
    """Registers nodes whose kubelet is reached at `host` and `port`."""

    def __init__(self, informer: Informer, *, host: str, port: int) -> None:
        self._informer = informer
        self._host = host
        self._port = port

    async def add(self, node: Node) -> None:
        """Create a ready Node object; an existing one is left unchanged."""
        labels = {"kubernetes.io/hostname": node.name, "kubernetes.io/os": "linux", **node.labels}
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node.name, "labels": labels},
            "spec": {"taints": [dict(taint) for taint in node.taints]},
        }
        try:
            made = await self._informer.create(NODE, body)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
            return
        at = now()
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        status = {
            "capacity": dict(node.resources),
            "allocatable": dict(node.resources),
            "conditions": [{**ready, "lastTransitionTime": at, "lastHeartbeatTime": at}],
            "addresses": [{"type": "InternalIP", "address": self._host}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
        }
        await self._informer.patch(NODE, made, {"status": status}, status=True)
