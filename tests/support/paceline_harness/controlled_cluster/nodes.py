"""Nodes that create pods and set their status as a test asks for."""

from __future__ import annotations

import threading
import time
from typing import Any

from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from paceline_harness.controlled_cluster.objects import NAMESPACE, Cluster, wait_until


class Nodes(threading.Thread):
    """Creates pods for Deployments and Jobs and sets their status as a test asks for."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.says: dict[str, dict[str, Any]] = {}  # status of new pods, by component
        self.refuses: dict[str, str] = {}  # why pods are rejected, by component
        self.jobsets = False
        self.quota = True  # for what is in a queue of Kueue
        self.drain_s = 0.0  # how long a deleted pod keeps running
        self.overlaps: list[str] = []  # trainers that started while an earlier one still existed
        self._ended = threading.Event()
        self._count = 0
        self._leaving: dict[str, float] = {}

    def stop(self) -> None:
        self._ended.set()
        self.join(60)

    def run(self) -> None:
        seen, looked_s = -1, 0.0
        while not self._ended.wait(0.05):
            revision, now_s = self.cluster.server.store.revision, time.monotonic()
            if revision == seen and now_s - looked_s < 1.0:
                continue
            seen, looked_s = revision, now_s
            try:
                self._round()
            except (ConflictError, NotFoundError):
                seen = -1

    def fail(self, pod: str, *, message: str = "", code: int = 1) -> None:
        """Let a running pod fail."""
        wait_until(lambda: self._runs(pod), f"{pod} does not run")
        over = {
            "exitCode": code,
            "reason": "Error",
            "message": message,
            "finishedAt": "2026-01-01T00:00:00Z",
        }
        container = {
            "name": "paceline",
            "state": {"terminated": over},
            "ready": False,
            "restartCount": 0,
            "image": "x",
            "imageID": "x",
        }
        status = {"phase": "Failed", "containerStatuses": [container], "conditions": []}
        self.cluster.set_status("Pod", pod, status)

    def restart(self, pod: str, *, message: str, times: int) -> None:
        """Let the container of a running pod end as often, as its kubelet tells it."""
        wait_until(lambda: self._runs(pod), f"{pod} does not run")
        status = running()
        (container,) = status["containerStatuses"]
        over = {"exitCode": 1, "reason": "Error", "message": message}
        over |= {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:01:00Z"}
        container |= {"restartCount": times, "lastState": {"terminated": over}}
        self.cluster.set_status("Pod", pod, status)

    def _runs(self, pod: str) -> bool:
        found = self.cluster.get("Pod", pod)
        return found is not None and found["status"].get("phase") == "Running"

    def _round(self) -> None:
        pods = self.cluster.list("Pod")
        for pod in pods:
            self._let_go(pod)
        for deployment in self.cluster.list("Deployment"):
            own = owned(pods, deployment)
            staying = [pod for pod in own if not pod["metadata"].get("deletionTimestamp")]
            replicas = deployment["spec"]["replicas"]
            if deployment["metadata"].get("deletionTimestamp"):
                continue
            for _ in range(replicas - len(staying)):
                self._count += 1
                name = f"{deployment['metadata']['name']}-{self._count}"
                self._make(deployment, name, deployment["spec"]["template"])
            for pod in staying[replicas:]:
                self.cluster.delete("Pod", pod["metadata"]["name"])
        for kind in ("Job", "JobSet") if self.jobsets else ("Job",):
            for job in self.cluster.list(kind):
                self._do_job(job, owned(pods, job))

    def _do_job(self, job: dict[str, Any], own: list[dict[str, Any]]) -> None:
        if job["metadata"].get("deletionTimestamp") or job.get("status", {}).get("conditions"):
            return
        if self._is_held(job, own):
            return
        if not own:
            same = f"paceline.dev/workload={job['metadata']['labels']['paceline.dev/workload']}"
            others = [pod for pod in self.cluster.list("Pod", same) if living(pod)]
            self.overlaps += [f"{job['metadata']['name']}: {p['metadata']['name']}" for p in others]
            in_set = job["kind"] == "JobSet"
            spec = job["spec"]["replicatedJobs"][0]["template"]["spec"] if in_set else job["spec"]
            for index in range(spec["completions"]):
                name = f"{job['metadata']['name']}{'-n-0' if in_set else ''}-{index}"
                self._make(job, name, spec["template"])
        phases = {pod["status"].get("phase") for pod in own}
        stamp = "2026-01-01T00:00:00Z"
        if "Failed" in phases:
            for pod in own:
                if living(pod):
                    self.cluster.delete("Pod", pod["metadata"]["name"])
            failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
            target = {"type": "FailureTarget", "status": "True", "reason": "BackoffLimitExceeded"}
            status = {"startTime": stamp, "failed": 1, "conditions": [target, failed]}
            self.cluster.set_status(job["kind"], job["metadata"]["name"], status)

    def _is_held(self, job: dict[str, Any], own: list[dict[str, Any]]) -> bool:
        """Admit or evict a queued Job as Kueue does; whether it is suspended, and has no pods."""
        held = job["spec"].get("suspend", False)
        if "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"] and held is self.quota:
            held = not self.quota
            self.cluster.patch(job["kind"], job["metadata"]["name"], {"spec": {"suspend": held}})
        if held:
            for pod in own:
                self.cluster.delete("Pod", pod["metadata"]["name"])
        return held

    def _make(self, owner: dict[str, Any], name: str, template: dict[str, Any]) -> None:
        about = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        refused = self.refuses.get(component(template), "")
        if owner["kind"] == "Deployment":
            self._say_failure(owner, refused)
        if refused:
            if owner["kind"] != "Deployment":
                self._tell_failure(about, refused)
            return
        reference = {**about, "controller": True, "blockOwnerDeletion": True}
        metadata = {
            "labels": template["metadata"].get("labels"),
            "annotations": template["metadata"].get("annotations"),
            "ownerReferences": [reference],
        }
        spec = {**template["spec"], "nodeName": self._node_for(template)}
        made = self.cluster.create("Pod", name, metadata=metadata, spec=spec)
        status = self.says.get(component(made), running())
        self.cluster.set_status("Pod", name, status)

    def _node_for(self, template: dict[str, Any]) -> str:
        """The first node without a pod that this one keeps away from."""
        apart = template["spec"].get("affinity", {}).get("podAntiAffinity", {})
        terms = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        taken = {
            pod["spec"]["nodeName"]
            for term in terms
            for pod in self.cluster.list("Pod")
            if term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        }
        return next(name for name in ("node-1", "node-2") if name not in taken)

    def _say_failure(self, owner: dict[str, Any], words: str) -> None:
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}
        failure |= {"message": words, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"conditions": [failure] if words else []}
        self.cluster.set_status("Deployment", owner["metadata"]["name"], status)

    def _tell_failure(self, about: dict[str, Any], words: str) -> None:
        """Record a failure event once: a repetition would only increase its count."""
        name = f"{about['name']}.refused"
        if self.cluster.get("Event", name) is None:
            self.cluster.create(
                "Event",
                name,
                regarding={**about, "namespace": NAMESPACE},
                reason="FailedCreate",
                type="Warning",
                note=f"Error creating: {words}",
                eventTime="2026-01-01T00:00:00.000000Z",
                reportingController="job-controller",
                reportingInstance="x",
                action="Create",
            )

    def _let_go(self, pod: dict[str, Any]) -> None:
        if not pod["metadata"].get("deletionTimestamp"):
            return
        since = self._leaving.setdefault(pod["metadata"]["uid"], time.monotonic())
        if time.monotonic() - since >= self.drain_s:
            self.cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)


def component(body: dict[str, Any]) -> str:
    return body["metadata"].get("labels", {}).get("app.kubernetes.io/component", "")


def living(pod: dict[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") not in {"Failed", "Succeeded"}


def owned(pods: list[dict[str, Any]], owner: dict[str, Any]) -> list[dict[str, Any]]:
    uid = owner["metadata"]["uid"]
    return [
        p
        for p in pods
        for r in p["metadata"].get("ownerReferences", ())
        if r["uid"] == uid and r.get("controller")
    ]


def running() -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    container = {
        "name": "paceline",
        "ready": True,
        "restartCount": 0,
        "image": "x",
        "imageID": "x",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    return {"phase": "Running", "conditions": [ready], "containerStatuses": [container]}
