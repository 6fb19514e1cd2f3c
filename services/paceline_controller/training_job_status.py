"""What a `TrainingJob` object needs next, and what its status says. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum

from paceline.types import JobState
from paceline.v1 import types_pb2
from paceline_controller.runtimes.kubernetes.resources import Object, deleting

FINALIZER = "paceline.dev/cancel"
MOST_REASON_CHARS = 4000
# Instead of the state of a job, where there is none.
REJECTED = "rejected"


class Step(StrEnum):
    """What is done next with an object."""

    HOLD = "hold"  # keep it from vanishing while its job lives
    SUBMIT = "submit"
    MIRROR = "mirror"
    CANCEL = "cancel"
    RELEASE = "release"
    NOTHING = "nothing"


def next_step(body: Object) -> Step:
    """From the object alone, so that a new controller goes on where the last one was."""
    status = body.get("status") or {}
    holds = FINALIZER in finalizers(body)
    if is_rejected(status) or is_over(status):
        return Step.RELEASE if holds else Step.NOTHING
    if not holds:
        return Step.NOTHING if deleting(body) else Step.HOLD
    if not status.get("jobId"):
        # Even when it is being deleted: an answer that was lost may have left a job behind,
        # and only the same request finds it.
        return Step.SUBMIT
    if deleting(body) and status.get("state") != JobState.CANCELLING:
        return Step.CANCEL
    return Step.MIRROR


def finalizers(body: Object) -> list[str]:
    """Who must let go before the object vanishes."""
    return body["metadata"].get("finalizers") or []


def held(body: Object) -> Object:
    """The change that adds our finalizer."""
    return {"metadata": {"finalizers": [*finalizers(body), FINALIZER]}}


def released(body: Object) -> Object:
    """The change that removes it."""
    return {"metadata": {"finalizers": [each for each in finalizers(body) if each != FINALIZER]}}


def is_rejected(status: Object) -> bool:
    """The gateway did not take the spec, which never changes."""
    found = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    return found.get("Accepted") == "False"


def is_over(status: Object) -> bool:
    """Its job has come to its end."""
    return bool(status.get("state")) and JobState(status["state"]).terminal


def rejected(body: Object, message: str, *, now: datetime) -> Object:
    """The status of an object whose spec is wrong."""
    accepted = _condition("Accepted", "False", "Invalid", message)
    seen = {"state": REJECTED, "reason": message[:MOST_REASON_CHARS]}
    return _status(body, seen, [accepted], now)


def mirrored(
    body: Object, job: types_pb2.Job, *, rollouts: int, waits_for: str, now: datetime
) -> Object:
    """The status of an object with a job; `waits_for` is its reason while it has no other."""
    seen = job.status
    state = JobState(seen.state)
    fields: Object = {
        "jobId": seen.job_id,
        "state": state.value,
        "reason": (seen.reason or ("" if state.terminal else waits_for))[:MOST_REASON_CHARS],
        "step": seen.step,
        "steps": _steps(job, body.get("status") or {}),
        "version": seen.version,
        "rolloutReplicas": 0 if state.terminal else rollouts,
    }
    if seen.HasField("eval_reward"):
        fields["evalReward"] = seen.eval_reward
    outcome = {JobState.SUCCEEDED: "True"}.get(state, "False" if state.terminal else "Unknown")
    conditions = [
        _condition("Accepted", "True", "Submitted", f"job {seen.job_id}"),
        _condition("Succeeded", outcome, state.value.capitalize(), seen.reason),
    ]
    return _status(body, fields, conditions, now)


def _steps(job: types_pb2.Job, before: Object) -> int:
    """As its spec says, or as was told before: its end matters even if the spec is unreadable."""
    try:
        return int(json.loads(job.spec_json)["stop"]["steps"])
    except (ValueError, TypeError, KeyError):
        return before.get("steps", 0)


def _condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message[:4000]}


def _status(body: Object, fields: Object, conditions: list[Object], now: datetime) -> Object:
    """With the conditions of others, and with the times of those that have not changed."""
    before = body.get("status") or {}
    known = {each["type"]: each for each in before.get("conditions") or ()}
    stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    generation = body["metadata"].get("generation", 1)
    for condition in conditions:
        old = known.get(condition["type"], {})
        same = old.get("status") == condition["status"]
        condition["lastTransitionTime"] = old["lastTransitionTime"] if same else stamp
        condition["observedGeneration"] = generation
        known[condition["type"]] = condition
    return {
        **before,
        **fields,
        "observedGeneration": generation,
        "conditions": list(known.values()),
    }
