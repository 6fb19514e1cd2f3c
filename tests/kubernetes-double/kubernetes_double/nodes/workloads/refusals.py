"""Reports pods that the API server rejects, as workload controllers do."""

from __future__ import annotations

import json

from kubernetes.aio.client import ApiException

from kubernetes_double.nodes.client import EVENT, POD, Kind, Object
from kubernetes_double.nodes.informer import Informer
from kubernetes_double.nodes.times import now
from kubernetes_double.nodes.workloads.pods import some_letters

REFUSED = (403, 422)  # exceeds a quota, violates an admission policy, or is invalid


async def create_pod(informer: Informer, kind: Kind, owner: Object, body: Object) -> Object:
    """Create a pod; records a rejection as an event of its owner and raises `ApiException`."""
    try:
        return await informer.create(POD, body)
    except ApiException as error:
        if error.status in REFUSED:
            await informer.objects.create(EVENT, _event(kind, owner, words_of(error)))
        raise


def words_of(error: ApiException) -> str:
    """The server's error message."""
    try:
        return json.loads(error.reason or "")["message"]
    except (ValueError, KeyError):
        return str(error.reason)


def _event(kind: Kind, owner: Object, words: str) -> Object:
    metadata = owner["metadata"]
    about = {"apiVersion": kind.api_version, "kind": kind.name, "name": metadata["name"]}
    about |= {"namespace": metadata["namespace"], "uid": metadata["uid"]}
    name = f"{metadata['name']}.{some_letters()}{some_letters()}"
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": about,
        "type": "Warning",
        "reason": "FailedCreate",
        "message": f"Error creating: {words}",
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "count": 1,
        "source": {"component": f"{kind.name.lower()}-controller"},
    }
