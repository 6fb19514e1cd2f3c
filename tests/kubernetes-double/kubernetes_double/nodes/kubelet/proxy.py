"""Implements the cluster addresses of Services: forwards packets to a ready pod."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kubernetes_double.errors import UnavailableError
from kubernetes_double.logs import Log
from kubernetes_double.nodes.client import SERVICE, SLICE, Kind, Object
from kubernetes_double.nodes.informer import Informer
from kubernetes_double.nodes.kubelet.network import Network

log = Log("cluster.proxy")

SERVICE_NAME = "kubernetes.io/service-name"
_BURST_S = 0.02
_RETRY_S = 0.5
_HEAD = "*nat\n:PREROUTING ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n"
_TAIL = "-A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE\nCOMMIT\n"


class Proxy:
    """Keeps the bridge's address translation in sync with the EndpointSlices."""

    def __init__(self, informer: Informer, network: Network) -> None:
        self._informer = informer
        self._network = network
        self._wake = asyncio.Event()
        informer.listen(self._changed)

    async def run(self) -> None:
        """Until cancelled."""
        written = ""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_BURST_S)
            self._wake.clear()
            rules = rules_of(self._informer.all(SERVICE), list(self._informer.all(SLICE)))
            if rules == written:
                continue
            try:
                await self._network.translate(rules)
                written = rules
            except UnavailableError as error:
                log.error("cannot update service addresses", error=str(error))
                asyncio.get_running_loop().call_later(_RETRY_S, self._wake.set)

    def _changed(self, kind: Kind, item: Object) -> None:
        if kind in (SERVICE, SLICE):
            self._wake.set()


def rules_of(services: Iterable[Object], slices: Iterable[Object]) -> str:
    """The complete table for iptables-restore. Ready pods get equal shares of connections."""
    behind = {_service_of(entry): entry for entry in slices}
    lines: list[str] = []
    for service in services:
        metadata = service["metadata"]
        entry = behind.get((metadata["namespace"], metadata["name"]), {})
        if not is_headless(service):
            for port in service["spec"].get("ports", []):
                lines += _port_rules(service["spec"]["clusterIP"], port, entry)
    return _HEAD + "".join(lines) + _TAIL


def is_headless(service: Object) -> bool:
    """Whether a Service's name resolves to the pods themselves."""
    return service["spec"].get("clusterIP") in (None, "", "None")


def _service_of(entry: Object) -> tuple[str, str]:
    metadata = entry["metadata"]
    return metadata["namespace"], (metadata.get("labels") or {}).get(SERVICE_NAME, "")


def _port_rules(address: str, port: Object, entry: Object) -> list[str]:
    targets = {one.get("name") or "": one["port"] for one in entry.get("ports") or []}
    target = targets.get(port.get("name", ""))
    ready = [
        endpoint["addresses"][0]
        for endpoint in entry.get("endpoints") or []
        if endpoint.get("conditions", {}).get("ready")
    ]
    if target is None:
        return []
    protocol = port.get("protocol", "TCP").lower()
    match = f"-A PREROUTING -d {address}/32 -p {protocol} -m {protocol} --dport {port['port']}"
    return [
        f"{match} -m statistic --mode random --probability {1 / (len(ready) - index):.6f}"
        f" -j DNAT --to-destination {pod}:{target}\n"
        for index, pod in enumerate(ready)
    ]
