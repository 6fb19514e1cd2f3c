"""Parses the stored record of a job, and the spec of a new one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from paceline.config import JobSpec, job_of, parse_job
from paceline.config.documents import read_json
from paceline.config.named import check_targets, module_targets
from paceline.enums import JobState, TrackerState
from paceline.errors import InvalidError
from paceline.plugins.allowed import AllowedTargets
from paceline.types import CheckpointStatus, Job, JobStatus, TrackerStatus
from paceline_experience.jobs.job_parts import JobParts

Value = str | int | float
_TRACKER = TypeAdapter(TrackerStatus)
CHECKPOINT_LIST = TypeAdapter(tuple[CheckpointStatus, ...])
CHECKPOINTS = "checkpoint_list"
TRACKING = "tracking:"
_TARGETS = "targets"  # in every record since functions of modules must be listed


def decoded(found: Any) -> dict[str, str]:
    """A Redis hash as text."""
    return {key.decode(): value.decode() for key, value in found.items()}


def parse_record(job_id: str, fields: Mapping[str, str], now: float) -> Job:
    """A job without its spec; `now` in seconds by the store's clock."""
    end = float(fields.get("ended", now))
    pausing_s = max(0.0, end - float(fields.get("paused", end)))
    reward, step = fields.get("eval_reward", ""), fields.get("eval_step", "")
    status = JobStatus(
        job_id=job_id,
        name=fields["name"],
        tenant=fields["tenant"],
        state=JobState(fields["state"]),
        reason=fields.get("reason", ""),
        step=int(fields.get("step", 0)),
        version=int(fields.get("version", -1)),
        incarnation=int(fields.get("incarnation", 0)),
        eval_reward=float(reward) if reward else None,
        eval_step=int(step) if step else None,
        summary=json.loads(fields.get("summary", "{}")),
        tracking=_trackers(fields),
        age_s=max(0.0, now - float(fields["created"]) - _seconds(fields, "paused_s") - pausing_s),
        runtime_s=_runtime_s(fields, end, pausing_s),
        checkpoints=CHECKPOINT_LIST.validate_json(fields.get(CHECKPOINTS, "[]")),
        created_at=_stamp(fields["created"]),
        started_at=_stamp(fields["running"]) if "running" in fields else None,
        finished_at=_stamp(fields["ended"]) if "ended" in fields else None,
    )
    return Job(status=status, spec="", artifacts=json.loads(fields["artifacts"]))


def readable_job(job_id: str, tenant: str, fields: Mapping[str, str], now: float) -> Job:
    """As `parse_record`; an unreadable record is reported as a failed job of `tenant`."""
    try:
        return parse_record(job_id, fields, now)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"its record cannot be read: {type(error).__name__}: {error}"
        status = JobStatus(
            job_id=job_id, name=job_id, tenant=tenant, state=JobState.FAILED, reason=reason
        )
        return Job(status=status, spec="", artifacts={})


def new_fields(job: JobParts, allowed: AllowedTargets) -> dict[str, Value]:
    """Fields of the record of a new job, besides its artifacts and when it was created.

    Raises:
        UnlistedError: it names a function of an installed module that is not `allowed`.
    """
    check_targets(job.plugins, allowed)
    fields: dict[str, Value] = {
        "name": job.name,
        "tenant": job.tenant,
        "state": JobState.QUEUED,
        "code": job.code or "",
        "data": job.data or "",
        _TARGETS: "checked",
    }
    for tracker in job.spec.tracking:
        waits = TrackerStatus(tracker.label, tracker.kind, TrackerState.WAITING)
        fields[TRACKING + tracker.label] = json.dumps(asdict(waits))
    return fields


def with_unlisted(job: Job, fields: Mapping[str, str], allowed: AllowedTargets) -> Job:
    """The job with what it may name although the operator has not listed it.

    A live job whose record does not say that they were checked was accepted before they had to be,
    and runs to its end. Every job that is submitted now is checked, and its record says so.
    """
    if _TARGETS in fields or job.status.state.terminal:
        return job
    with suppress(InvalidError):  # a record that cannot be parsed names nothing
        named = {each for each in module_targets(job_of(job)).values() if each not in allowed}
        return replace(job, status=replace(job.status, unlisted=tuple(sorted(named))))
    return job


def _seconds(fields: Mapping[str, str], name: str) -> float:
    return float(fields.get(name, 0.0))


def _runtime_s(fields: Mapping[str, str], end: float, pausing_s: float) -> float:
    """Seconds since the job has begun to run, without those that it was paused."""
    if "running" not in fields:
        return 0.0
    paused_s = _seconds(fields, "paused_run_s") + pausing_s
    return max(0.0, end - float(fields["running"]) - paused_s)


def _stamp(seconds: str) -> str:
    """ISO 8601, such as `2026-11-23T15:04:05Z`."""
    time = datetime.fromtimestamp(float(seconds), UTC).replace(tzinfo=None)
    return f"{time.isoformat(timespec='seconds')}Z"


def size_of(job: Job) -> int:
    """Approximate size in bytes of a job in a list."""
    status = job.status
    trackers = sum(len(each.detail) + len(each.url) + 64 for each in status.tracking)
    trackers += 128 * len(status.checkpoints)
    return 1024 + len(status.reason) + len(str(status.summary)) + trackers


def _trackers(fields: Mapping[str, str]) -> tuple[TrackerStatus, ...]:
    names = sorted(name for name in fields if name.startswith(TRACKING))
    return tuple(_TRACKER.validate_json(fields[name]) for name in names)


def read_spec(text: str) -> JobSpec:
    """Parse a job from JSON; raises `InvalidError`."""
    return parse_job(read_json(text, what="spec_json"))
