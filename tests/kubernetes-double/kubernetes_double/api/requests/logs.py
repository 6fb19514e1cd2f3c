"""Pod logs, fetched from the kubelet of the pod's node as the real server does.

The kubelet's address comes from the node: `status.daemonEndpoints.kubeletEndpoint.Port` and the
InternalIP in `status.addresses`; the path is `/containerLogs/NAMESPACE/POD/CONTAINER` with the
query of the request. Uses plain HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kubernetes_double.api.requests.errors import bad_request, internal
from kubernetes_double.api.storage.store import Store

Object = dict[str, Any]


@dataclass
class PodLogs:
    """Relays logs from kubelets; `connect_s` bounds the wait for one."""

    store: Store
    connect_s: float = 5.0

    async def serve(self, request: web.Request, pod: Object) -> web.StreamResponse:
        """Stream the log of one container; 204 if the pod has no node yet.

        Raises 400 (which container?), 500 (no kubelet).
        """
        container = _container(pod, request.query.get("container", ""))
        if not pod["spec"].get("nodeName"):
            return web.Response(status=204)
        metadata = pod["metadata"]
        url = self._kubelet(pod)
        path = f"{url}/containerLogs/{metadata['namespace']}/{metadata['name']}/{container}"
        timeout = aiohttp.ClientTimeout(total=None, connect=self.connect_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(path, params=dict(request.query)) as upstream,
            ):
                return await _relay(request, upstream)
        except aiohttp.ClientConnectionError as error:
            raise internal(f"Get {path}: {error}") from error

    def _kubelet(self, pod: Object) -> str:
        name = pod["spec"]["nodeName"]
        node = self.store.get("nodes", ("", name)) or {}
        status = node.get("status", {})
        endpoint = status.get("daemonEndpoints", {}).get("kubeletEndpoint", {})
        for address in status.get("addresses", ()):
            if address["type"] == "InternalIP" and "Port" in endpoint:
                return f"http://{address['address']}:{endpoint['Port']}"
        raise internal(f"node {name!r} tells no address of its kubelet")


def _container(pod: Object, wanted: str) -> str:
    names = [
        one["name"]
        for part in ("containers", "initContainers")
        for one in pod["spec"].get(part, ())
    ]
    main = [one["name"] for one in pod["spec"]["containers"]]
    name = pod["metadata"]["name"]
    if wanted and wanted not in names:
        raise bad_request(f"container {wanted} is not valid for pod {name}")
    if not wanted and len(main) > 1:
        raise bad_request(
            f"a container name must be specified for pod {name}, choose one of: {main}"
        )
    return wanted or main[0]


async def _relay(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    if upstream.status != 200:
        text = await upstream.text()
        raise bad_request(text.strip() or f"the kubelet answered {upstream.status}")
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    async for chunk in upstream.content.iter_any():
        await response.write(chunk)
    return response
