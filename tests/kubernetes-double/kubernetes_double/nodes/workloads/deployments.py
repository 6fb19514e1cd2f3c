"""Deployments: identical pods, with rolling updates when the template changes.

ReplicaSets exist between a Deployment and its pods for clients that read them; their replica counts
follow the pods. A ReplicaSet without a Deployment does nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from kubernetes.aio.client import ApiException

from kubernetes_double.nodes.client import DEPLOYMENT, POD, REPLICA_SET, Kind, Object
from kubernetes_double.nodes.informer import (
    Informer,
    Key,
    controller_of,
    key_of,
    owner_reference,
)
from kubernetes_double.nodes.loop import Loop, changed, own_and_owned
from kubernetes_double.nodes.times import now
from kubernetes_double.nodes.workloads.pods import (
    amount,
    condition,
    first_to_go,
    is_leaving,
    is_over,
    is_ready,
    pod_of,
    revision_of,
    some_letters,
)
from kubernetes_double.nodes.workloads.refusals import REFUSED, create_pod, words_of

_HASH = "pod-template-hash"
_REVISION = "deployment.kubernetes.io/revision"
_HISTORY = 10
_ENOUGH = "MinimumReplicasAvailable"


@dataclass(frozen=True, slots=True)
class Change:
    """The next step: the number of pods to start from the new template, and the pods to delete."""

    start: int
    stop: tuple[Object, ...]


def change_of(spec: Object, fresh: list[Object], old: list[Object]) -> Change:
    """The next step, given the pods that are not being deleted. Pure."""
    replicas, strategy = spec.get("replicas", 1), spec.get("strategy", {})
    if strategy.get("type") == "Recreate":
        if old:
            return Change(0, tuple(old))
        return _fill(replicas, fresh, most=replicas)
    rolling = strategy.get("rollingUpdate") or {}
    surge = amount(rolling.get("maxSurge", "25%"), replicas, up=True)
    missing = amount(rolling.get("maxUnavailable", "25%"), replicas, up=False)
    if surge == missing == 0:
        missing = 1
    more = _fill(replicas, fresh, most=replicas + surge - len(old))
    ready = sum(is_ready(pod) for pod in (*fresh, *old))
    spare = ready - (replicas - missing)
    broken = [pod for pod in old if not is_ready(pod)]
    whole = [pod for pod in first_to_go(old) if is_ready(pod)]
    return Change(more.start, (*more.stop, *broken, *whole[: max(0, spare)]))


def _fill(replicas: int, fresh: list[Object], *, most: int) -> Change:
    start = max(0, min(replicas, most) - len(fresh))
    return Change(start, tuple(first_to_go(fresh)[: max(0, len(fresh) - replicas)]))


class Deployments:
    """The controller of Deployments and their ReplicaSets, one per template."""

    def __init__(self, informer: Informer) -> None:
        self._informer = informer
        self._own = own_and_owned(DEPLOYMENT, REPLICA_SET)
        self.loop = Loop(informer, sync=self.sync, keys_of=self._keys_of)

    async def sync(self, key: Key) -> None:
        """Advance one Deployment by a step and write its status."""
        owner = self._informer.get(DEPLOYMENT, key)
        if owner is None or "deletionTimestamp" in owner["metadata"]:
            return
        revision = revision_of(owner["spec"]["template"])
        fresh = await self._set_of(owner, revision)
        refused: ApiException | None = None
        try:
            if not owner["spec"].get("paused"):
                await self._step(owner, fresh)
        except ApiException as error:
            if error.status not in REFUSED:
                raise
            refused = error
        words = words_of(refused) if refused else ""
        for each in self._informer.owned(REPLICA_SET, owner):
            await self._count(each, words if _hash(each) == revision else "")
        await self._report(owner, fresh, words)
        if refused:
            raise refused  # to be tried again

    async def _set_of(self, owner: Object, revision: str) -> Object:
        sets = self._informer.owned(REPLICA_SET, owner)
        for each in sets:
            if _hash(each) == revision:
                return each
        for each in _forgotten(sets, owner["spec"].get("revisionHistoryLimit", _HISTORY)):
            await self._informer.delete(REPLICA_SET, each)
        newest = max((_number(each) for each in sets), default=0)
        return await self._informer.create(REPLICA_SET, _set(owner, revision, newest + 1))

    async def _step(self, owner: Object, fresh: Object) -> None:
        sets = self._informer.owned(REPLICA_SET, owner)
        pods = [pod for each in sets for pod in self._informer.owned(POD, each)]
        for pod in pods:
            if is_over(pod) and not is_leaving(pod):
                await self._informer.delete(POD, pod)
        running = [pod for pod in pods if not is_over(pod) and not is_leaving(pod)]
        new = [pod for pod in running if _hash(pod) == _hash(fresh)]
        step = change_of(owner["spec"], new, [pod for pod in running if pod not in new])
        for pod in step.stop:
            await self._informer.delete(POD, pod)
        recreate = owner["spec"].get("strategy", {}).get("type") == "Recreate"
        if recreate and any(_hash(pod) != _hash(fresh) for pod in pods):
            return
        for _ in range(step.start):
            name = f"{fresh['metadata']['name']}-{some_letters()}"
            pod = pod_of(REPLICA_SET, fresh, fresh["spec"]["template"], name=name)
            await create_pod(self._informer, REPLICA_SET, fresh, pod)

    async def _count(self, of: Object, refused: str) -> None:
        """Write the number of pods of a ReplicaSet, and why there are not more."""
        pods = self._pods(of)
        if of["spec"]["replicas"] != len(pods):
            of = await self._informer.patch(REPLICA_SET, of, {"spec": {"replicas": len(pods)}})
        ready = sum(map(is_ready, pods))
        status = {
            "observedGeneration": of["metadata"].get("generation", 1),
            "replicas": len(pods),
            "fullyLabeledReplicas": len(pods),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": _failure(refused, of.get("status", {})),
        }
        if changed(of.get("status", {}), status):
            await self._informer.patch(REPLICA_SET, of, {"status": status}, status=True)

    async def _report(self, owner: Object, fresh: Object, refused: str) -> None:
        before, replicas = owner.get("status", {}), owner["spec"].get("replicas", 1)
        new = self._pods(fresh)
        pods = [p for each in self._informer.owned(REPLICA_SET, owner) for p in self._pods(each)]
        ready = sum(map(is_ready, pods))
        whole = sum(map(is_ready, new)) >= replicas and len(new) == len(pods)
        progress = "NewReplicaSetAvailable" if whole else "ReplicaSetUpdated"
        status = {
            "observedGeneration": owner["metadata"].get("generation", 1),
            "replicas": len(pods),
            "updatedReplicas": len(new),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "unavailableReplicas": max(0, replicas - ready),
            "conditions": [
                condition(
                    "Available", holds=ready >= replicas, reason=_ENOUGH, at=now(), before=before
                ),
                condition("Progressing", holds=True, reason=progress, at=now(), before=before),
                *_failure(refused, before),
            ],
        }
        if changed(before, status):
            await self._informer.patch(DEPLOYMENT, owner, {"status": status}, status=True)

    def _pods(self, of: Object) -> list[Object]:
        return [pod for pod in self._informer.owned(POD, of) if not is_leaving(pod)]

    def _keys_of(self, kind: Kind, item: Object) -> Iterable[Key]:
        if kind is not POD:
            return self._own(kind, item)
        owner = controller_of(item) or {}
        of = self._informer.get(REPLICA_SET, (key_of(item)[0], owner.get("name", "")))
        return [] if of is None else self._own(REPLICA_SET, of)


def _failure(refused: str, before: Object) -> list[Object]:
    """The condition of a workload whose pods are rejected."""
    if not refused:
        return []
    kind, reason = "ReplicaFailure", "FailedCreate"
    return [
        {**condition(kind, holds=True, reason=reason, at=now(), before=before), "message": refused}
    ]


def _hash(item: Object) -> str:
    return (item["metadata"].get("labels") or {}).get(_HASH, "")


def _number(of: Object) -> int:
    return int((of["metadata"].get("annotations") or {}).get(_REVISION, "0"))


def _forgotten(sets: list[Object], limit: int) -> list[Object]:
    """The oldest ReplicaSets without pods, beyond the history limit."""
    empty = [each for each in sets if not each.get("status", {}).get("replicas", 0)]
    return sorted(empty, key=_number)[: max(0, len(empty) - limit)]


def _set(owner: Object, revision: str, number: int) -> Object:
    template = copy.deepcopy(owner["spec"]["template"])
    labels = {**template.get("metadata", {}).get("labels", {}), _HASH: revision}
    template["metadata"] = {**template.get("metadata", {}), "labels": labels}
    metadata = {
        "name": f"{owner['metadata']['name']}-{revision}",
        "namespace": owner["metadata"]["namespace"],
        "labels": labels,
        "annotations": {_REVISION: str(number)},
        "ownerReferences": owner_reference(DEPLOYMENT, owner),
    }
    selector = copy.deepcopy(owner["spec"]["selector"])
    selector["matchLabels"] = {**selector.get("matchLabels", {}), _HASH: revision}
    spec = {"replicas": 0, "selector": selector, "template": template}
    head = {"apiVersion": REPLICA_SET.api_version, "kind": REPLICA_SET.name}
    return {**head, "metadata": metadata, "spec": spec}
