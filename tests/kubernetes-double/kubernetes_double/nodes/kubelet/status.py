"""Computes the status of a pod from those of its containers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kubernetes_double.nodes.client import Object
from kubernetes_double.nodes.times import now


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The kubelet's view of a pod. `why_waiting`: why it cannot be set up."""

    address: str = ""
    host: str = ""
    started: str = ""
    init: Sequence[Object] = ()
    containers: Sequence[Object] = ()
    initialized: bool = False
    why_waiting: str = ""


def status_of(pod: Object, seen: Seen) -> Object:
    """The complete status; conditions that did not change keep their times."""
    phase = _phase(pod, seen)
    over = phase in ("Succeeded", "Failed")
    ready = (
        phase == "Running" and bool(seen.containers) and all(c["ready"] for c in seen.containers)
    )
    reason = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase, "ContainersNotReady")
    conditions = {
        "PodScheduled": (True, "", ""),
        "PodReadyToStartContainers": (bool(seen.address) and not over, "", ""),
        "Initialized": (seen.initialized, "ContainersNotInitialized", ""),
        "ContainersReady": (ready, reason, seen.why_waiting),
        "Ready": (ready, reason, seen.why_waiting),
    }
    before = pod.get("status", {})
    kept = {c["type"]: c for c in before.get("conditions", [])}
    made = [_condition(kept.pop(kind, None), kind, *state) for kind, state in conditions.items()]
    status: Object = {
        "phase": phase,
        "conditions": [*made, *kept.values()],
        "containerStatuses": list(seen.containers),
        "startTime": seen.started,
        "hostIP": seen.host,
    }
    if seen.init:
        status["initContainerStatuses"] = list(seen.init)
    if seen.address:
        status |= {"podIP": seen.address, "podIPs": [{"ip": seen.address}]}
    return status


def waiting(container: Object, reason: str) -> Object:
    """The status of a container that has never started."""
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": False,
        "started": False,
        "restartCount": 0,
        "state": {"waiting": {"reason": reason}},
        "lastState": {},
    }


def _phase(pod: Object, seen: Seen) -> str:
    policy = pod["spec"].get("restartPolicy", "Always")
    if not seen.initialized:
        codes = [c["state"].get("terminated", {}).get("exitCode", 0) for c in seen.init]
        return "Failed" if policy == "Never" and any(codes) else "Pending"
    ends = [c["state"].get("terminated") for c in seen.containers]
    if ends and all(end is not None for end in ends):
        codes = [end["exitCode"] for end in ends if end is not None]
        stopped = "deletionTimestamp" in pod["metadata"]
        if policy == "Never" or stopped:
            return "Failed" if any(codes) else "Succeeded"
        if policy == "OnFailure" and not any(codes):
            return "Succeeded"
        return "Running"
    begun = any("waiting" not in c["state"] or c["lastState"] for c in seen.containers)
    return "Running" if begun else "Pending"


def _condition(before: Object | None, kind: str, holds: bool, reason: str, message: str) -> Object:
    made: Object = {"type": kind, "status": "True" if holds else "False"}
    if not holds and reason:
        made["reason"] = reason
    if not holds and message:
        made["message"] = message
    same = before is not None and before["status"] == made["status"]
    made["lastTransitionTime"] = before["lastTransitionTime"] if before and same else now()
    return made
