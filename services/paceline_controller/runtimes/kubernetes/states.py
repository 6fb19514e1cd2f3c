"""States of a workload, from its objects and pods. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from paceline_controller.jobs.observed import Observed
from paceline_controller.runtimes.kubernetes.admission import is_evicted
from paceline_controller.runtimes.kubernetes.manifests import CONTAINER
from paceline_controller.runtimes.kubernetes.names import INCARNATION, JOB, workload_of
from paceline_controller.runtimes.kubernetes.resources import (
    Object,
    annotations_of,
    condition,
    deleting,
    labels_of,
    name_of,
)

# The kubelet has by then waited about five minutes between restarts.
MAX_RESTARTS = 5
_ENDED = {"Succeeded", "Failed"}
# A container that waits for one of these is on its way.
_ON_ITS_WAY = {"", "ContainerCreating", "PodInitializing"}


class LifeEnd(NamedTuple):
    """How the main container of a pod ended last."""

    lives: int  # that have ended
    lived_s: float
    words: str  # the end of its output


def of_deployment(body: Object, pods: Iterable[Object], *, name: str = "") -> Observed:
    """A rollout workload, or (`name` given) a shared pool of the chart."""
    pods = list(pods)
    replicas = body["spec"].get("replicas", 1)
    ready = sum(is_ready(pod) for pod in pods)
    return Observed(
        name=name or workload_of(body),
        job_id=labels_of(body).get(JOB, ""),
        alive=not deleting(body) and not (ready == 0 and crash_loop(pods)),
        replicas=replicas,
        ready=ready,
        pending=ready == 0 and replicas > 0,
    )


def of_trainer(bodies: Iterable[Object], pods: Iterable[Object]) -> Observed:
    """A trainer by the Jobs (or JobSets) of all its incarnations; the newest one counts."""
    newest = max(bodies, key=incarnation_of)
    own = [pod for pod in pods if incarnation_of(pod) == incarnation_of(newest)]
    wanted = pods_wanted(newest)
    ready = sum(is_ready(pod) for pod in own)
    return Observed(
        name=workload_of(newest),
        job_id=labels_of(newest).get(JOB, ""),
        alive=not ended(newest) and not deleting(newest) and not is_evicted(newest),
        ready=int(ready == wanted),
        pending=ready < wanted,
    )


def incarnation_of(body: Object) -> int:
    """The incarnation of a Job, a JobSet or a pod; -1 for one that has none."""
    return int(annotations_of(body).get(INCARNATION, -1))


def same_incarnation(pod: Object, body: Object) -> bool:
    """Whether a pod belongs to this Job or JobSet."""
    return incarnation_of(pod) == incarnation_of(body)


def pods_wanted(body: Object) -> int:
    """How many pods a Job or a JobSet has when all is well."""
    spec: Any = body["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec.get("completions", 1)


def ended(body: Object) -> bool:
    """A Job or a JobSet has come to its end, good or bad."""
    return any(condition(body, kind) for kind in ("Complete", "Completed", "Failed"))


def is_ready(pod: Object) -> bool:
    """Whether a pod passes its readiness probe and is not being deleted."""
    return condition(pod, "Ready") is not None and not deleting(pod)


def live(pod: Object) -> bool:
    """Something of it may still run."""
    return pod.get("status", {}).get("phase") not in _ENDED


def preempted(pod: Object) -> str:
    """Why the cluster takes it away from us; empty if it does not."""
    disruption = condition(pod, "DisruptionTarget")
    if disruption is None:
        return ""
    return f"{disruption.get('reason', 'Disrupted')}: {disruption.get('message', '')}".rstrip(": ")


def crash_loop(pods: Iterable[Object]) -> bool:
    """A container was restarted again and again without success."""
    return any(
        status.get("restartCount", 0) >= MAX_RESTARTS
        and status.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff"
        for pod in pods
        for status in _statuses(pod)
    )


def waits_for(pods: Iterable[Object]) -> str:
    """The reason why pods do not start, such as machines or images; empty if they do."""
    for pod in pods:
        if not live(pod) or deleting(pod):
            continue
        if reason := _why_unscheduled(pod) or _cannot_start(pod):
            return f"{name_of(pod)}: {reason}"
    return ""


def refused(body: Object) -> str:
    """Why the cluster does not even make the pods of a Deployment, for example a quota."""
    failure = condition(body, "ReplicaFailure")
    return f"{failure.get('reason', '')}: {failure.get('message', '')}" if failure else ""


def ended_at(pod: Object) -> str:
    """When its first container ended, to sort by; those that did not come last."""
    ends = [
        over["finishedAt"]
        for status in _statuses(pod)
        if (over := status.get("state", {}).get("terminated")) and over.get("finishedAt")
    ]
    return min(ends, default="~")


def last_end(pod: Object) -> LifeEnd | None:
    """The last end of the main container, of those that the kubelet restarts; None: no end yet."""
    for status in pod.get("status", {}).get("containerStatuses") or ():
        now = status.get("state", {}).get("terminated")
        over = now or status.get("lastState", {}).get("terminated")
        if status["name"] == CONTAINER and over:
            lived_s = _seconds(over.get("startedAt"), over.get("finishedAt"))
            lives = status.get("restartCount", 0) + (now is not None)
            return LifeEnd(lives, lived_s, (over.get("message") or "").strip())
    return None


def last_words(pod: Object) -> str:
    """How the main container ended, as the kubelet tells it; empty if it did not."""
    status = pod.get("status", {})
    lines = [_of_pod(status)]
    for container in _statuses(pod):
        over = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
            "terminated"
        )
        if over and (container["name"] == CONTAINER or over.get("exitCode")):
            text = (
                f"{container['name']} ended with {over.get('exitCode')} ({over.get('reason', '')})"
            )
            lines.append(f"{text}: {over['message']}" if over.get("message") else text)
    return "\n".join(line for line in lines if line)


def _seconds(start: str | None, end: str | None) -> float:
    if not start or not end:
        return 0.0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def _of_pod(status: Object) -> str:
    reason, message = status.get("reason", ""), status.get("message", "")
    return f"{reason}: {message}".strip(": ")


def _statuses(pod: Object) -> Iterator[Object]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _why_unscheduled(pod: Object) -> str:
    for entry in pod.get("status", {}).get("conditions") or ():
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return f"{entry.get('reason', 'Unschedulable')}: {entry.get('message', '')}"
    return ""


def _cannot_start(pod: Object) -> str:
    for status in _statuses(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if waiting and reason not in _ON_ITS_WAY:
            return f"{reason}: {waiting.get('message', '')}".rstrip(": ")
    return ""
