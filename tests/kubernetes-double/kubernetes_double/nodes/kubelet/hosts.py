"""Name resolution in pods: a hosts file in place of the cluster's DNS."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kubernetes_double.nodes.client import Object
from kubernetes_double.nodes.kubelet.proxy import SERVICE_NAME, is_headless

DOMAIN = "svc.cluster.local"
_FIRST = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"


def hosts_of(namespace: str, services: Iterable[Object], slices: Iterable[Object]) -> str:
    """A hosts file for pods of a namespace.

    The name of a Service resolves to its cluster address; that of a headless one to all its ready
    pods, and `<hostname>.<service>` to one of them.
    """
    lines: list[str] = []
    headless: set[tuple[str, str]] = set()
    for service in services:
        where, name = service["metadata"]["namespace"], service["metadata"]["name"]
        if is_headless(service):
            headless.add((where, name))
        else:
            names = _names(name, where, short=where == namespace)
            lines.append(f"{service['spec']['clusterIP']} {' '.join(names)}\n")
    for entry in slices:
        where = entry["metadata"]["namespace"]
        service_name = (entry["metadata"].get("labels") or {}).get(SERVICE_NAME, "")
        if (where, service_name) in headless:
            lines += _pods(entry, _names(service_name, where, short=where == namespace))
    return _FIRST + "".join(sorted(lines))


def write_hosts(folder: Path, text: str, *, own: str) -> None:
    """Replace the file atomically, so that no resolver reads a partial one."""
    fresh = folder / "hosts.new"
    fresh.write_text(f"{text}{own}\n")
    fresh.chmod(0o644)
    fresh.replace(folder / "hosts")


def _pods(entry: Object, names: list[str]) -> list[str]:
    lines: list[str] = []
    for endpoint in entry.get("endpoints") or []:
        if endpoint.get("conditions", {}).get("ready"):
            hostname = endpoint.get("hostname")
            own = [f"{hostname}.{name}" for name in names] if hostname else []
            lines.append(f"{endpoint['addresses'][0]} {' '.join([*own, *names])}\n")
    return lines


def _names(service: str, namespace: str, *, short: bool) -> list[str]:
    full = [
        f"{service}.{namespace}",
        f"{service}.{namespace}.svc",
        f"{service}.{namespace}.{DOMAIN}",
    ]
    return [service, *full] if short else full
