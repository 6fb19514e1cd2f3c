"""Binds pods to nodes: selectors, affinity to nodes, taints, resources. No preemption, no spread.

Also deletes the pods of nodes that no longer exist.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from kubernetes_double.nodes.client import NODE, POD, Kind, Object
from kubernetes_double.nodes.informer import Informer, Key, key_of, matches
from kubernetes_double.nodes.loop import Loop
from kubernetes_double.nodes.times import now
from kubernetes_double.nodes.workloads.pods import is_over

_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, **_BINARY}


class Scheduler:
    """The controller that binds each pod to the feasible node with the fewest pods."""

    def __init__(self, informer: Informer) -> None:
        self._informer = informer
        self._given: dict[str, str] = {}  # nodes of pods whose binding has not been observed yet
        self.loop = Loop(informer, sync=self.sync, keys_of=self._keys_of)

    async def sync(self, key: Key) -> None:
        """Bind one pod, or report why that is not possible."""
        pod = self._informer.get(POD, key)
        if pod is None:
            return
        if name := pod["spec"].get("nodeName"):
            if self._informer.get(NODE, ("", name)) is None:
                await self._informer.delete(POD, pod, grace_s=0)
            return
        if "deletionTimestamp" in pod["metadata"]:
            await self._informer.delete(POD, pod, grace_s=0)
            return
        if pod["metadata"]["uid"] in self._given:
            return
        bound = self._bound()
        nodes = list(self._informer.all(NODE))
        reasons = {key_of(node)[1]: why_not(pod, node, bound) for node in nodes}
        fitting = [name for name, reason in reasons.items() if not reason]
        if not fitting:
            await self._refuse(pod, reasons)
            return
        crowd = Counter(p["spec"]["nodeName"] for p in bound)
        await self._bind(pod, min(fitting, key=lambda name: (crowd[name], name)))

    def _bound(self) -> list[Object]:
        """Pods that occupy resources, with their nodes."""
        found: list[Object] = []
        for pod in self._informer.all(POD):
            uid, spec = pod["metadata"]["uid"], pod["spec"]
            if "nodeName" in spec:
                self._given.pop(uid, None)
            elif uid in self._given:
                pod = {**pod, "spec": {**spec, "nodeName": self._given[uid]}}
            if "nodeName" in pod["spec"] and not is_over(pod):
                found.append(pod)
        return found

    async def _bind(self, pod: Object, node: str) -> None:
        metadata = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        await self._informer.objects.create(POD, body, subresource="binding")
        self._given[pod["metadata"]["uid"]] = node

    async def _refuse(self, pod: Object, reasons: Mapping[str, str]) -> None:
        counts = ", ".join(
            f"{n} {reason}" for reason, n in sorted(Counter(reasons.values()).items())
        )
        message = f"0/{len(reasons)} nodes are available: {counts}."
        before = pod.get("status", {}).get("conditions", [])
        if any(c["type"] == "PodScheduled" and c.get("message") == message for c in before):
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": now(),
        }
        status = {"phase": "Pending", "conditions": [condition]}
        await self._informer.patch(POD, pod, {"status": status}, status=True)

    def _keys_of(self, kind: Kind, item: Object) -> Iterable[Key]:
        """The pod that changed; every pending one if resources may have become free."""
        if kind is POD and not self._has_node(item):
            return [key_of(item)]
        if kind is NODE and item.get("deleted"):
            return [key_of(pod) for pod in self._informer.all(POD)]
        if kind is NODE or (kind is POD and (item.get("deleted") or is_over(item))):
            pods = self._informer.all(POD)
            return [key_of(pod) for pod in pods if "nodeName" not in pod["spec"]]
        return []

    def _has_node(self, pod: Object) -> bool:
        """Whether a pod is bound to an existing node."""
        name = pod["spec"].get("nodeName")
        return name is not None and self._informer.get(NODE, ("", name)) is not None


def why_not(pod: Object, node: Object, bound: Iterable[Object]) -> str:
    """Why a pod does not fit a node; empty if it does. Pure."""
    spec, labels = node.get("spec", {}), node["metadata"].get("labels", {})
    conditions = node.get("status", {}).get("conditions", [])
    if not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
        return "node(s) were not ready"
    if spec.get("unschedulable"):
        return "node(s) were unschedulable"
    tolerations = pod["spec"].get("tolerations", [])
    for taint in spec.get("taints", []):
        if taint["effect"] != "PreferNoSchedule" and not _tolerates(tolerations, taint):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if not matches({"matchLabels": pod["spec"].get("nodeSelector", {})}, labels):
        return "node(s) didn't match Pod's node affinity/selector"
    if not _likes(pod, labels):
        return "node(s) didn't match Pod's node affinity/selector"
    name = key_of(node)[1]
    used = needs_of(*(other for other in bound if other["spec"]["nodeName"] == name))
    room = node["status"].get("allocatable", {})
    for resource, needed in needs_of(pod).items():
        if used.get(resource, 0.0) + needed > quantity(room.get(resource, "0")):
            return f"Insufficient {resource}"
    return ""


def needs_of(*pods: Object) -> dict[str, float]:
    """The sum of resource requests (limits if there are none), by resource."""
    total: dict[str, float] = defaultdict(float)
    for pod in pods:
        total["pods"] += 1
        for container in pod["spec"]["containers"]:
            resources = container.get("resources", {})
            wanted = (resources.get("limits") or {}) | (resources.get("requests") or {})
            for name, value in wanted.items():
                total[name] += quantity(value)
    return total


def quantity(text: str | int | float) -> float:
    """Parse a quantity such as `500m` or `16Gi`."""
    text = str(text)
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * _SUFFIXES[suffix]
    return float(text)


def _tolerates(tolerations: list[Object], taint: Object) -> bool:
    for toleration in tolerations:
        if toleration.get("effect") not in (None, "", taint["effect"]):
            continue
        if toleration.get("operator", "Equal") == "Exists":
            if toleration.get("key") in (None, "", taint["key"]):
                return True
        elif (toleration.get("key"), toleration.get("value", "")) == (
            taint["key"],
            taint.get("value", ""),
        ):
            return True
    return False


def _likes(pod: Object, labels: dict[str, str]) -> bool:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    terms = required["nodeSelectorTerms"]
    return any(matches({"matchExpressions": t.get("matchExpressions", [])}, labels) for t in terms)
