"""The kubelet of all nodes: pods bound to any of them run on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from kubernetes_double.errors import NotFoundError
from kubernetes_double.nodes.client import (
    CONFIG_MAP,
    POD,
    SECRET,
    SERVICE,
    SLICE,
    Kind,
    Object,
)
from kubernetes_double.nodes.informer import Informer, key_of
from kubernetes_double.nodes.kubelet.hosts import hosts_of
from kubernetes_double.nodes.kubelet.machine import Machine
from kubernetes_double.nodes.kubelet.network import Network
from kubernetes_double.nodes.kubelet.pod import PodWorker, Surroundings
from kubernetes_double.nodes.kubelet.supervisor import BackOff, Supervisor
from kubernetes_double.nodes.kubelet.tokens import Tokens

_BURST_S = 0.02
_OVER = ("Succeeded", "Failed")


class Kubelet:
    """Starts, monitors and stops pods according to their objects."""

    def __init__(
        self,
        informer: Informer,
        *,
        network: Network,
        machine: Machine,
        tokens: Tokens,
        back_off: BackOff,
        folder: Path,
        logs: Callable[[Object, str], Path],
        claims: Path,
    ) -> None:
        self._informer = informer
        self._workers: dict[str, PodWorker] = {}
        self._hosts: dict[str, str] = {}
        self._due: asyncio.TimerHandle | None = None
        self._around = Surroundings(
            informer=informer,
            network=network,
            machine=machine,
            tokens=tokens,
            back_off=back_off,
            folder=folder,
            claims=claims,
            logs=logs,
            hosts=self._hosts_of,
            lookup=self._lookup,
        )
        informer.listen(self._changed)

    def supervisor(self, namespace: str, pod: str, container: str = "") -> Supervisor:
        """The supervisor of a pod's container, the first one if not named.

        Raises:
            NotFoundError: no such container has been started.
        """
        for worker in reversed(self._workers.values()):
            if worker.name == pod and worker.pod["metadata"]["namespace"] == namespace:
                found = worker.supervisor(container)
                if found is not None:
                    return found
        raise NotFoundError(f"pod {namespace}/{pod} runs no container {container!r}")

    async def close(self) -> None:
        """Kill all pods but leave their objects."""
        await asyncio.gather(*(worker.abandon() for worker in self._workers.values()))

    def _changed(self, kind: Kind, item: Object) -> None:
        if kind is POD:
            self._pod(item)
        elif kind in (SERVICE, SLICE):
            self._hosts.clear()
            self._soon(self._rename)
        elif kind in (CONFIG_MAP, SECRET):
            self._refresh(item)

    def _pod(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if pod.get("deleted"):
            if worker is not None:
                del self._workers[uid]
                worker.end(0)
        elif worker is not None:
            worker.update(pod)
        elif "nodeName" in pod["spec"] and pod.get("status", {}).get("phase") not in _OVER:
            worker = self._workers[uid] = PodWorker(pod, self._around)
            worker.update(pod)

    def _refresh(self, item: Object) -> None:
        namespace, name = key_of(item)
        for worker in self._workers.values():
            pod = worker.pod
            if pod["metadata"]["namespace"] == namespace and name in _sources_of(pod):
                worker.refresh()

    def _soon(self, action: Callable[[], None]) -> None:
        """Run an action soon, once per burst of changes."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(_BURST_S, action)

    def _rename(self) -> None:
        self._due = None
        for worker in self._workers.values():
            worker.rename()

    def _hosts_of(self, namespace: str) -> str:
        if namespace not in self._hosts:
            services, slices = self._informer.all(SERVICE), self._informer.all(SLICE)
            self._hosts[namespace] = hosts_of(namespace, services, slices)
        return self._hosts[namespace]

    def _lookup(self, namespace: str) -> Callable[[Kind, str], Object | None]:
        def find(kind: Kind, name: str) -> Object | None:
            return self._informer.get(kind, (namespace, name))

        return find


def _sources_of(pod: Object) -> set[str]:
    """Names of the Secrets and ConfigMaps in a pod's volumes."""
    found: set[str] = set()
    for volume in pod["spec"].get("volumes", []):
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            shown = source.get("secret") or source.get("configMap") or {}
            found.add(shown.get("secretName") or shown.get("name", ""))
    return found
