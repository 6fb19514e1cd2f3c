"""The API calls that the nodes need, on plain dictionaries, through the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, ApiException, Configuration

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
_TIMEOUT_S = 30.0
_WATCH_S = 600


@dataclass(frozen=True, slots=True)
class Kind:
    """The API path components of a kind."""

    name: str
    group: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of objects."""
        return self.group.removeprefix("api/").removeprefix("apis/")


NODE = Kind("Node", "api/v1", "nodes", namespaced=False)
POD = Kind("Pod", "api/v1", "pods")
SERVICE_ACCOUNT = Kind("ServiceAccount", "api/v1", "serviceaccounts")
SERVICE = Kind("Service", "api/v1", "services")
SECRET = Kind("Secret", "api/v1", "secrets")
CONFIG_MAP = Kind("ConfigMap", "api/v1", "configmaps")
CLAIM = Kind("PersistentVolumeClaim", "api/v1", "persistentvolumeclaims")
SLICE = Kind("EndpointSlice", "apis/discovery.k8s.io/v1", "endpointslices")
EVENT = Kind("Event", "api/v1", "events")
DEPLOYMENT = Kind("Deployment", "apis/apps/v1", "deployments")
REPLICA_SET = Kind("ReplicaSet", "apis/apps/v1", "replicasets")
STATEFUL_SET = Kind("StatefulSet", "apis/apps/v1", "statefulsets")
JOB = Kind("Job", "apis/batch/v1", "jobs")
ALL = (
    *(NODE, SECRET, CONFIG_MAP, CLAIM, SERVICE, SLICE),
    *(DEPLOYMENT, REPLICA_SET, STATEFUL_SET, JOB, POD),
)


class Objects:
    """Reads and writes objects; raises `ApiException` for errors of the server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def list(self, kind: Kind) -> tuple[list[Object], str]:
        """All objects of a kind, and the resource version of the list."""
        answer = await self._call("GET", f"/{kind.group}/{kind.plural}")
        items = [{"kind": kind.name, "apiVersion": kind.api_version, **o} for o in answer["items"]]
        return items, answer["metadata"]["resourceVersion"]

    async def create(self, kind: Kind, body: Object, *, subresource: str = "") -> Object:
        """Create an object, or POST to a subresource of the object that the body names."""
        path = self._path(kind, body["metadata"].get("namespace", ""))
        if subresource:
            path += f"/{body['metadata']['name']}/{subresource}"
        return await self._call("POST", path, body)

    async def patch(self, kind: Kind, of: Object, body: Object, *, status: bool = False) -> Object:
        """Merge-patch an object, or its status."""
        path = self.path_of(kind, of) + ("/status" if status else "")
        return await self._call("PATCH", path, body, content=MERGE)

    async def delete(self, kind: Kind, of: Object, *, grace_s: int | None = None) -> Object:
        """Delete this object by uid: a later one of the same name is left alone."""
        body: Object = {"preconditions": {"uid": of["metadata"]["uid"]}}
        body["propagationPolicy"] = "Background"
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        return await self._call("DELETE", self.path_of(kind, of), body)

    async def watch(self, kind: Kind, since: str) -> AsyncIterator[tuple[str, Object]]:
        """Watch events from a resource version on, until the server ends the stream."""
        query = {
            "watch": "true",
            "resourceVersion": since,
            "timeoutSeconds": _WATCH_S,
            "allowWatchBookmarks": "true",
        }
        path = f"/{kind.group}/{kind.plural}?{urlencode(query)}"
        answer = await self._send("GET", path, None, timeout_s=_WATCH_S + _TIMEOUT_S)
        async with answer.response as stream:
            if answer.status >= 400:
                raise ApiException(status=answer.status, reason=await stream.text())
            async for line in stream.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiException(status=event["object"]["code"], reason=str(event["object"]))
                yield event["type"], event["object"]

    def path_of(self, kind: Kind, of: Object) -> str:
        """The API path of one object."""
        metadata = of["metadata"]
        return f"{self._path(kind, metadata.get('namespace', ''))}/{metadata['name']}"

    @staticmethod
    def _path(kind: Kind, namespace: str) -> str:
        where = f"/namespaces/{namespace}" if kind.namespaced else ""
        return f"/{kind.group}{where}/{kind.plural}"

    async def _call(
        self, method: str, path: str, body: Object | None = None, *, content: str = ""
    ) -> Object:
        answer = await self._send(method, path, body, content=content)
        data = await answer.read()
        if not 200 <= answer.status < 300:
            raise ApiException(status=answer.status, reason=data.decode(errors="replace"))
        return json.loads(data)

    async def _send(
        self,
        method: str,
        path: str,
        body: Object | None,
        *,
        content: str = "",
        timeout_s: float = _TIMEOUT_S,
    ) -> Any:
        settings = self._client.configuration
        headers = {"Accept": "application/json", "Content-Type": content or "application/json"}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        return await self._client.rest_client.request(
            method, settings.host + path, headers=headers, body=body, _request_timeout=timeout_s
        )


async def connect(kubeconfig: Path) -> ApiClient:
    """A client of the server in the kubeconfig file."""
    settings = Configuration()
    settings.connection_pool_maxsize = 64
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=settings)
    return ApiClient(settings)
