"""Jobs: pods that run to completion, indexed if the completion mode is Indexed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from kubernetes_double.nodes.client import JOB, POD, Kind, Object
from kubernetes_double.nodes.informer import Informer, Key, controller_of
from kubernetes_double.nodes.loop import Loop, changed, own_and_owned
from kubernetes_double.nodes.times import now, seconds_since
from kubernetes_double.nodes.workloads.pods import (
    is_leaving,
    is_over,
    is_ready,
    pod_of,
    some_letters,
)
from kubernetes_double.nodes.workloads.refusals import create_pod

INDEX = "batch.kubernetes.io/job-completion-index"
_FAILED = "Failed"
_COMPLETE = "Complete"


@dataclass(slots=True)
class Tally:
    """Pods of a job by outcome. `done`: indices, or names without indices."""

    active: list[Object] = field(default_factory=list[Object])
    done: set[str] = field(default_factory=set[str])
    failures: int = 0


class Jobs:
    """The controller of Jobs. A pod that is deleted before it succeeded counts as failed."""

    def __init__(self, informer: Informer) -> None:
        self._informer = informer
        self._lost: Counter[str] = Counter()
        self._gone_done: dict[str, set[str]] = {}
        informer.listen(self._remember)
        self.loop = Loop(informer, sync=self.sync, keys_of=own_and_owned(JOB, POD))

    async def sync(self, key: Key) -> None:
        """Start missing pods, delete surplus ones, write the status."""
        job = self._informer.get(JOB, key)
        if job is None or "deletionTimestamp" in job["metadata"]:
            return
        if end := _end_of(job):
            await self._expire(key, job, end)
            return
        tally = self._tally(job)
        end = self._verdict(key, job, tally)
        if end is not None or job["spec"].get("suspend"):
            for pod in tally.active:
                await self._informer.delete(POD, pod)
        else:
            for index in _missing(job, tally):
                pod = await create_pod(self._informer, JOB, job, _pod(job, index))
                tally.active.append(pod)
        await self._report(job, tally, end)

    def _remember(self, kind: Kind, item: Object) -> None:
        """Record pods that are gone, which still count."""
        owner = controller_of(item) if kind is POD and item.get("deleted") else None
        if owner is None or owner["kind"] != JOB.name:
            return
        if item.get("status", {}).get("phase") == "Succeeded":
            self._gone_done.setdefault(owner["uid"], set()).add(_index_of(item))
        else:
            self._lost[owner["uid"]] += 1

    def _tally(self, job: Object) -> Tally:
        uid = job["metadata"]["uid"]
        tally = Tally(done=set(self._gone_done.get(uid, ())), failures=self._lost[uid])
        for pod in self._informer.owned(POD, job):
            match pod.get("status", {}).get("phase"):
                case "Succeeded":
                    tally.done.add(_index_of(pod))
                case "Failed":
                    tally.failures += 1
                case _ if is_leaving(pod):
                    continue
                case _:
                    statuses = pod.get("status", {}).get("containerStatuses", [])
                    tally.failures += sum(status["restartCount"] for status in statuses)
                    tally.active.append(pod)
        return tally

    def _verdict(self, key: Key, job: Object, tally: Tally) -> Object | None:
        """The condition that ends the job, if it should end now."""
        spec = job["spec"]
        deadline_s = spec.get("activeDeadlineSeconds")
        started = job.get("status", {}).get("startTime")
        if deadline_s is not None and started:
            left_s = deadline_s - seconds_since(started)
            if left_s <= 0:
                text = "Job was active longer than specified deadline"
                return _condition(_FAILED, "DeadlineExceeded", text)
            asyncio.get_running_loop().call_later(left_s, self.loop.add, key)
        if tally.failures > spec.get("backoffLimit", 6):
            text = "Job has reached the specified backoff limit"
            return _condition(_FAILED, "BackoffLimitExceeded", text)
        if len(tally.done) >= _wanted(job):
            return _condition(_COMPLETE, "CompletionsReached", "Reached expected number of pods")
        return None

    async def _report(self, job: Object, tally: Tally, end: Object | None) -> None:
        before = job.get("status", {})
        over = end is not None
        status: Object = {
            "startTime": before.get("startTime") or now(),
            "active": 0 if over else len(tally.active),
            "ready": 0 if over else sum(map(is_ready, tally.active)),
            "succeeded": len(tally.done),
            "failed": tally.failures + (len(tally.active) if over else 0),
        }
        if _is_indexed(job):
            status["completedIndexes"] = ",".join(sorted(tally.done, key=int))
        if end is not None:
            status["conditions"] = [*before.get("conditions", []), end]
            if end["type"] == _COMPLETE:
                status["completionTime"] = now()
        if changed(before, status):
            await self._informer.patch(JOB, job, {"status": status}, status=True)

    async def _expire(self, key: Key, job: Object, end: Object) -> None:
        """Delete a finished job when its time to live has passed."""
        ttl_s = job["spec"].get("ttlSecondsAfterFinished")
        if ttl_s is None:
            return
        left_s = ttl_s - seconds_since(end["lastTransitionTime"])
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self.loop.add, key)
        elif all(is_over(pod) for pod in self._informer.owned(POD, job)):
            await self._informer.delete(JOB, job)


def _end_of(job: Object) -> Object | None:
    conditions = job.get("status", {}).get("conditions", [])
    ends = (_FAILED, _COMPLETE)
    return next((c for c in conditions if c["type"] in ends and c["status"] == "True"), None)


def _is_indexed(job: Object) -> bool:
    return job["spec"].get("completionMode") == "Indexed"


def _wanted(job: Object) -> int:
    spec = job["spec"]
    return spec.get("completions", 1 if _is_indexed(job) else spec.get("parallelism", 1))


def _index_of(pod: Object) -> str:
    return (pod["metadata"].get("annotations") or {}).get(INDEX, pod["metadata"]["name"])


def _missing(job: Object, tally: Tally) -> list[str]:
    """Indices to start now; empty strings without indices."""
    room = job["spec"].get("parallelism", 1) - len(tally.active)
    left = _wanted(job) - len(tally.done) - len(tally.active)
    if not _is_indexed(job):
        return [""] * max(0, min(room, left))
    busy = {_index_of(pod) for pod in tally.active} | tally.done
    free = [str(number) for number in range(_wanted(job)) if str(number) not in busy]
    return free[: max(0, room)]


def _pod(job: Object, index: str) -> Object:
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    stem = f"{name}-{index}" if index else name
    pod = pod_of(JOB, job, job["spec"]["template"], name=f"{stem}-{some_letters()}")
    labels = {"job-name": name, "controller-uid": uid}
    pod["metadata"]["labels"] |= labels
    pod["metadata"]["labels"] |= {f"batch.kubernetes.io/{key}": v for key, v in labels.items()}
    if index:
        pod["metadata"]["annotations"][INDEX] = index
        pod["metadata"]["labels"][INDEX] = index
        pod["spec"]["hostname"] = stem
        for container in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]):
            variable = {"name": "JOB_COMPLETION_INDEX", "value": index}
            container["env"] = [variable, *container.get("env", [])]
    return pod


def _condition(kind: str, reason: str, message: str) -> Object:
    at = now()
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastProbeTime": at,
        "lastTransitionTime": at,
    }
