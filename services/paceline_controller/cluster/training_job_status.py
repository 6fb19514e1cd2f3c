"""The next step for a `TrainingJob` object, and its status. Pure functions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum

from paceline.enums import JobState
from paceline.types import Job
from paceline_controller.runtimes.kubernetes.resources import Object, deleting

FINALIZER = "paceline.dev/cancel"
MAX_REASON_CHARS = 4000
# In place of a job's state if there is no job.
REJECTED = "rejected"


class NextStep(StrEnum):
    """The next step for an object."""

    HOLD = "hold"  # add a finalizer, so that it outlives its job
    SUBMIT = "submit"
    MIRROR = "mirror"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    RELEASE = "release"
    OUTLIVE = "outlive"  # it is over: delete the object once its job has been deleted
    NOTHING = "nothing"


def next_step(body: Object) -> NextStep:
    """Depends on the object alone, so that another leader continues where the last one stopped."""
    status = body.get("status") or {}
    holds = FINALIZER in finalizers(body)
    if is_rejected(status) or is_over(status):
        if holds:
            return NextStep.RELEASE
        alone = is_rejected(status) or deleting(body)
        return NextStep.NOTHING if alone else NextStep.OUTLIVE
    if not holds:
        return NextStep.NOTHING if deleting(body) else NextStep.HOLD
    if not status.get("jobId"):
        # Even while it is being deleted: a lost answer may have left a job behind, which only the
        # same request finds.
        return NextStep.SUBMIT
    if deleting(body) and status.get("state") != JobState.CANCELLING:
        return NextStep.CANCEL
    return NextStep.MIRROR if deleting(body) else _suspended(body)


def _suspended(body: Object) -> NextStep:
    """The step that `spec.suspend` asks for; unless it is set, API and CLI pause and resume."""
    suspend = body.get("spec", {}).get("suspend")
    state = (body.get("status") or {}).get("state")
    if suspend is True and state in (JobState.QUEUED, JobState.STARTING, JobState.RUNNING):
        return NextStep.PAUSE
    if suspend is False and state == JobState.PAUSED:
        return NextStep.RESUME
    return NextStep.MIRROR


def finalizers(body: Object) -> list[str]:
    """Finalizers of an object."""
    return body["metadata"].get("finalizers") or []


def held(body: Object) -> Object:
    """A patch that adds our finalizer."""
    return {"metadata": {"finalizers": [*finalizers(body), FINALIZER]}}


def released(body: Object) -> Object:
    """A patch that removes our finalizer."""
    return {
        "metadata": {
            "finalizers": [finalizer for finalizer in finalizers(body) if finalizer != FINALIZER]
        }
    }


def is_rejected(status: Object) -> bool:
    """Whether no job can be made of the spec, which is immutable."""
    statuses = {
        condition["type"]: condition["status"] for condition in status.get("conditions") or ()
    }
    return statuses.get("Accepted") == "False"


def is_over(status: Object) -> bool:
    """Whether its job is over."""
    return bool(status.get("state")) and JobState(status["state"]).terminal


def rejected(body: Object, message: str, *, now: datetime) -> Object:
    """The status of an object with an invalid spec."""
    accepted = _condition("Accepted", "False", "Invalid", message)
    seen = {"state": REJECTED, "reason": message[:MAX_REASON_CHARS]}
    return _status(body, seen, [accepted], now)


def unmade(body: Object, message: str, *, now: datetime) -> Object:
    """The status of an object whose job cannot be made, although its spec is valid."""
    conditions = [
        _condition("Accepted", "False", "NotFound", message),
        _condition("Succeeded", "False", "Failed", message),
    ]
    seen = {"state": JobState.FAILED.value, "reason": message[:MAX_REASON_CHARS]}
    return _status(body, seen, conditions, now)


def mirrored(body: Object, job: Job, *, rollouts: int, waits_for: str, now: datetime) -> Object:
    """The status of an object with a job; `waits_for` is used if the job has no reason."""
    seen = job.status
    state = seen.state
    fields: Object = {
        "jobId": seen.job_id,
        "state": state.value,
        "reason": (seen.reason or ("" if state.terminal else waits_for))[:MAX_REASON_CHARS],
        "step": seen.step,
        "steps": _steps(job, body.get("status") or {}),
        "version": seen.version,
        "rolloutReplicas": 0 if state.terminal else rollouts,
    }
    if seen.eval_reward is not None:
        fields["evalReward"] = seen.eval_reward
    outcome = {JobState.SUCCEEDED: "True"}.get(state, "False" if state.terminal else "Unknown")
    conditions = [
        _condition("Accepted", "True", "Submitted", f"job {seen.job_id}"),
        _condition("Succeeded", outcome, state.value.capitalize(), seen.reason),
    ]
    return _status(body, fields, conditions, now)


def _steps(job: Job, before: Object) -> int:
    """Steps by the job's spec, or by the last status if the spec is unreadable."""
    try:
        return int(json.loads(job.spec)["stop"]["steps"])
    except (ValueError, TypeError, KeyError):
        return before.get("steps", 0)


def _condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message[:4000]}


def _status(body: Object, fields: Object, conditions: list[Object], now: datetime) -> Object:
    """Keeps conditions of others, and the transition times of those that have not changed."""
    before = body.get("status") or {}
    known = {entry["type"]: entry for entry in before.get("conditions") or ()}
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
