"""StatefulSets: pods with stable ordinals, each with its own claims."""

from __future__ import annotations

from kubernetes_double.nodes.client import CLAIM, POD, STATEFUL_SET, Object
from kubernetes_double.nodes.informer import Informer, Key, owner_reference
from kubernetes_double.nodes.loop import Loop, changed, own_and_owned
from kubernetes_double.nodes.workloads.pods import (
    is_leaving,
    is_over,
    is_ready,
    pod_of,
    revision_of,
)

_REVISION = "controller-revision-hash"
_NAME = "statefulset.kubernetes.io/pod-name"
_INDEX = "apps.kubernetes.io/pod-index"


class StatefulSets:
    """The controller of StatefulSets."""

    def __init__(self, informer: Informer) -> None:
        self._informer = informer
        keys_of = own_and_owned(STATEFUL_SET, POD)
        self.loop = Loop(informer, sync=self.sync, keys_of=keys_of)

    async def sync(self, key: Key) -> None:
        """Start missing pods, replace outdated ones in reverse order, write the status."""
        owner = self._informer.get(STATEFUL_SET, key)
        if owner is None or "deletionTimestamp" in owner["metadata"]:
            return
        pods = {pod["metadata"]["name"]: pod for pod in self._informer.owned(POD, owner)}
        revision, names = revision_of(owner["spec"]["template"]), _names(owner)
        await self._start(owner, pods, revision)
        await self._stop(owner, pods, names, revision)
        held = [pod for pod in self._informer.owned(POD, owner) if not is_leaving(pod)]
        ready = sum(map(is_ready, held))
        fresh = sum(pod["metadata"]["labels"].get(_REVISION) == revision for pod in held)
        status = {
            "observedGeneration": owner["metadata"].get("generation", 1),
            "replicas": len(held),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "updatedReplicas": fresh,
            "currentReplicas": fresh,
            "currentRevision": revision,
            "updateRevision": revision,
        }
        if changed(owner.get("status", {}), status):
            await self._informer.patch(STATEFUL_SET, owner, {"status": status}, status=True)

    async def _start(self, owner: Object, pods: dict[str, Object], revision: str) -> None:
        in_order = owner["spec"].get("podManagementPolicy", "OrderedReady") == "OrderedReady"
        for number, name in enumerate(_names(owner)):
            if name not in pods:
                await self._claim(owner, name)
                await self._informer.create(POD, _pod(owner, name, number, revision))
            if in_order and not (name in pods and is_ready(pods[name])):
                return

    async def _stop(
        self, owner: Object, pods: dict[str, Object], names: list[str], revision: str
    ) -> None:
        strategy = owner["spec"].get("updateStrategy", {}).get("type", "RollingUpdate")
        for name, pod in sorted(pods.items(), reverse=True):
            outdated = pod["metadata"]["labels"].get(_REVISION) != revision
            replaced = outdated and strategy == "RollingUpdate"
            if not is_leaving(pod) and (name not in names or is_over(pod) or replaced):
                await self._informer.delete(POD, pod)
                return
            if name in names and not is_ready(pod):
                return

    async def _claim(self, owner: Object, pod: str) -> None:
        for template in owner["spec"].get("volumeClaimTemplates", []):
            name = f"{template['metadata']['name']}-{pod}"
            namespace = owner["metadata"]["namespace"]
            if self._informer.get(CLAIM, (namespace, name)) is None:
                metadata: Object = {"name": name, "namespace": namespace}
                metadata["labels"] = owner["spec"]["selector"].get("matchLabels", {})
                kept = owner["spec"].get("persistentVolumeClaimRetentionPolicy", {})
                if kept.get("whenDeleted") == "Delete":
                    metadata["ownerReferences"] = owner_reference(STATEFUL_SET, owner)
                body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
                await self._informer.create(CLAIM, {**body, "spec": template["spec"]})


def _names(owner: Object) -> list[str]:
    replicas = owner["spec"].get("replicas", 1)
    return [f"{owner['metadata']['name']}-{number}" for number in range(replicas)]


def _pod(owner: Object, name: str, number: int, revision: str) -> Object:
    pod = pod_of(STATEFUL_SET, owner, owner["spec"]["template"], name=name)
    pod["metadata"]["labels"] |= {_REVISION: revision, _NAME: name, _INDEX: str(number)}
    spec = pod["spec"]
    spec["hostname"] = name
    spec["subdomain"] = owner["spec"].get("serviceName", "")
    claims = [
        template["metadata"]["name"] for template in owner["spec"].get("volumeClaimTemplates", [])
    ]
    volumes = [volume for volume in spec.get("volumes", []) if volume["name"] not in claims]
    for claim in claims:
        source = {"claimName": f"{claim}-{name}"}
        volumes.append({"name": claim, "persistentVolumeClaim": source})
    spec["volumes"] = volumes
    return pod
