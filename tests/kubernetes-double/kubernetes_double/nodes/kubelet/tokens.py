"""A pod's access to the API server: ServiceAccount tokens, CA certificate, address."""

from __future__ import annotations

from collections.abc import Mapping

from kubernetes.aio.client import ApiException

from kubernetes_double.errors import NotFoundError
from kubernetes_double.nodes.client import SERVICE_ACCOUNT, Object, Objects
from kubernetes_double.nodes.kubelet.volumes import audiences_of

_LIFE_S = 3607


class Tokens:
    """Tokens for pods; `variables` has the kubelet's environment variables for the API server."""

    def __init__(self, objects: Objects, *, host: str, port: int) -> None:
        self._objects = objects
        self.variables = {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": str(port),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(port),
        }

    async def of(self, pod: Object) -> Mapping[str, str]:
        """Tokens by audience, for every audience in the pod's volumes.

        Raises:
            NotFoundError: its ServiceAccount does not exist.
        """
        return {audience: await self._token(pod, audience) for audience in audiences_of(pod)}

    async def _token(self, pod: Object, audience: str) -> str:
        metadata = pod["metadata"]
        name = pod["spec"].get("serviceAccountName", "default")
        bound = {
            "kind": "Pod",
            "apiVersion": "v1",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        body: Object = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "spec": {
                "audiences": [audience] if audience else [],
                "boundObjectRef": bound,
                "expirationSeconds": _LIFE_S,
            },
        }
        try:
            answer = await self._objects.create(SERVICE_ACCOUNT, body, subresource="token")
        except ApiException as error:
            raise NotFoundError(f"token of serviceaccount {name!r}: {error.reason}") from None
        return answer["status"]["token"]
