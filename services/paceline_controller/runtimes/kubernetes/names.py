"""Labels, annotations and names of the objects that the controller creates."""

from __future__ import annotations

import hashlib

from paceline.enums import WorkerKind
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.kubernetes.resources import Object, annotations_of, labels_of

MANAGER = "paceline-controller"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
JOB = "paceline.dev/job"
POOL = "paceline.dev/pool"
WORKLOAD = "paceline.dev/workload"
INCARNATION = "paceline.dev/incarnation"
TEMPLATE = "paceline.dev/template"
ACCELERATORS = "paceline.dev/accelerators"
"""Annotation of a Deployment: `Wanted.accelerators`."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label that Kueue reads."""
QUARANTINED = "paceline.dev/quarantined"
"""Label of a pod: the workload that keeps away from its node."""
UNTIL = "paceline.dev/quarantined-until"
REASON = "paceline.dev/reason"

# Host names have at most 63 characters; the rest is for an incarnation and two indices.
MAX_NAME_CHARS = 44
_DIGEST_CHARS = 8


def object_name(workload: str) -> str:
    """The name of a workload; if it is too long, its prefix and a digest of the whole."""
    if len(workload) <= MAX_NAME_CHARS:
        return workload
    digest = hashlib.sha256(workload.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{workload[: MAX_NAME_CHARS - _DIGEST_CHARS - 1].rstrip('-')}-{digest}"


def labels(wanted: Wanted, *, release: str) -> dict[str, str]:
    """Labels of all objects of a workload."""
    pool = {POOL: wanted.pool} if wanted.pool else {}
    return {
        "app.kubernetes.io/name": "paceline",
        INSTANCE: release,
        COMPONENT: str(wanted.kind),
        MANAGED_BY: MANAGER,
        JOB: wanted.job_id,
        WORKLOAD: object_name(wanted.name),
        **pool,
    }


def annotations_for(wanted: Wanted) -> dict[str, str]:
    """Annotations of all objects of a workload."""
    count = wanted.accelerators
    return {WORKLOAD: wanted.name} | ({} if count is None else {ACCELERATORS: str(count)})


def queue_label(wanted: Wanted) -> dict[str, str]:
    """The label with which Kueue admits a workload; empty without a queue."""
    return {QUEUE: wanted.queue} if wanted.queue else {}


def selector(*, release: str, workload: str = "") -> str:
    """Label selector for all objects of a release's controller, or for one of its workloads."""
    whole = f"{INSTANCE}={release},{MANAGED_BY}={MANAGER}"
    return f"{whole},{WORKLOAD}={object_name(workload)}" if workload else whole


def workload_of(body: Object) -> str:
    """The workload that an object belongs to; empty if the controller did not create it."""
    # The annotation holds the full name: a label has at most 63 characters.
    if labels_of(body).get(MANAGED_BY) != MANAGER:
        return ""
    return annotations_of(body).get(WORKLOAD) or labels_of(body).get(WORKLOAD, "")


def wanted_of(body: Object) -> Wanted:
    """The `Wanted` of a Deployment, as far as its labels record it; current replicas."""
    carried = labels_of(body)
    count = annotations_of(body).get(ACCELERATORS)
    return Wanted(
        name=workload_of(body),
        kind=WorkerKind(carried[COMPONENT]),
        job_id=carried.get(JOB, ""),
        pool=carried.get(POOL, ""),
        replicas=body["spec"].get("replicas", 1),
        accelerators=None if count is None else int(count),
        queue=carried.get(QUEUE, ""),
    )
