"""Workloads that Kueue holds until its quota has room for all of their pods. Pure.

Kueue suspends a Job or JobSet, and gates each pod of a Deployment. Waiting for quota may take days
and is no fault; being suspended again after pods have run ends a life, as preemption does.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline_controller.runtimes.kubernetes.names import QUEUE
from paceline_controller.runtimes.kubernetes.resources import Object, labels_of

GATE = "kueue.x-k8s.io/admission"


def is_suspended(body: Object) -> bool:
    """Whether a Job or JobSet is to have no pods for now."""
    return body["spec"].get("suspend") is True


def is_evicted(body: Object) -> bool:
    """Whether a Job or JobSet is suspended after it was admitted.

    It is created suspended, as generation 1; being admitted, and suspended again, are changes.
    """
    return is_suspended(body) and body["metadata"].get("generation", 1) > 1


def waits_for_admission(body: Object, pods: Iterable[Object]) -> str:
    """Which queue a Job, JobSet or Deployment waits in; empty: it is admitted, or in none."""
    if is_suspended(body) or any(_is_gated(pod) for pod in pods):
        queue = labels_of(body).get(QUEUE, "")
        return f"waits in Kueue's queue {queue!r} for quota" if queue else "is suspended"
    return ""


def _is_gated(pod: Object) -> bool:
    gates = pod.get("spec", {}).get("schedulingGates") or ()
    return any(gate["name"] == GATE for gate in gates)
