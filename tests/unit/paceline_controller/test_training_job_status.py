"""What a TrainingJob needs next, from the object alone."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import JobState
from paceline.types import Job, JobStatus
from paceline_controller.cluster.training_job_status import (
    FINALIZER,
    NextStep,
    held,
    mirrored,
    next_step,
    rejected,
    released,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def thing(*, holds: bool = False, deleting: bool = False, **status: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "a", "generation": 1, "finalizers": ["someone/else"]}
    if holds:
        metadata["finalizers"].append(FINALIZER)
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {"metadata": metadata, "status": status}


def job(state: JobState, *, reason: str = "", step: int = 3) -> Job:
    status = JobStatus("a-1", "a", "default", state, reason=reason, step=step, version=2)
    return Job(status, json.dumps({"stop": {"steps": 20}}))


def test_next_steps_of_a_training_job() -> None:
    assert next_step(thing()) is NextStep.HOLD
    assert next_step(thing(holds=True)) is NextStep.SUBMIT
    assert next_step(thing(holds=True, jobId="a-1", state="queued")) is NextStep.MIRROR
    assert next_step(thing(holds=True, jobId="a-1", state="succeeded")) is NextStep.RELEASE
    assert next_step(thing(jobId="a-1", state="succeeded")) is NextStep.OUTLIVE
    assert next_step(thing(deleting=True, jobId="a-1", state="failed")) is NextStep.NOTHING


def test_steps_of_a_deletion() -> None:
    assert next_step(thing(deleting=True)) is NextStep.NOTHING
    assert (
        next_step(thing(deleting=True, holds=True)) is NextStep.SUBMIT
    )  # finds what was submitted
    running = thing(deleting=True, holds=True, jobId="a-1", state="running")
    assert next_step(running) is NextStep.CANCEL
    ending = thing(deleting=True, holds=True, jobId="a-1", state="cancelling")
    assert next_step(ending) is NextStep.MIRROR
    over = thing(deleting=True, holds=True, jobId="a-1", state="cancelled")
    assert next_step(over) is NextStep.RELEASE


@pytest.mark.parametrize(
    ("suspend", "state", "step"),
    [
        (True, "queued", NextStep.PAUSE),
        (True, "running", NextStep.PAUSE),
        (True, "pausing", NextStep.MIRROR),
        (True, "paused", NextStep.MIRROR),
        (True, "succeeded", NextStep.RELEASE),
        (False, "pausing", NextStep.MIRROR),
        (False, "paused", NextStep.RESUME),
        (False, "running", NextStep.MIRROR),
        (None, "paused", NextStep.MIRROR),  # somebody has paused it over the API
    ],
)
def test_suspending_pauses_the_job(suspend: bool | None, state: str, step: NextStep) -> None:
    body = thing(holds=True, jobId="a-1", state=state)
    body["spec"] = {} if suspend is None else {"suspend": suspend}
    assert next_step(body) is step
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ends = NextStep.RELEASE if step is NextStep.RELEASE else NextStep.CANCEL
    assert next_step(body) is ends


def test_an_invalid_spec_is_left_alone() -> None:
    body = thing(holds=True)
    body["status"] = rejected(body, "tasks.environment: 'x' is unknown", now=NOW)
    assert body["status"]["state"] == "rejected"
    assert next_step(body) is NextStep.RELEASE
    assert next_step({**body, **released(body)}) is NextStep.NOTHING


def test_only_our_finalizer_comes_and_goes() -> None:
    assert held(thing()) == {"metadata": {"finalizers": ["someone/else", FINALIZER]}}
    assert released(thing(holds=True)) == {"metadata": {"finalizers": ["someone/else"]}}


def test_status_mirrors_the_job() -> None:
    body = thing(holds=True)
    status = mirrored(body, job(JobState.RUNNING), rollouts=4, waits_for="", now=NOW)
    conditions = {each["type"]: each for each in status.pop("conditions")}
    assert status == {
        "jobId": "a-1",
        "state": "running",
        "reason": "",
        "step": 3,
        "steps": 20,
        "version": 2,
        "rolloutReplicas": 4,
        "observedGeneration": 1,
    }
    assert conditions["Accepted"]["status"] == "True"
    assert conditions["Succeeded"]["status"] == "Unknown"


def test_reasons_are_the_jobs_before_the_pods() -> None:
    waiting = mirrored(thing(), job(JobState.STARTING), rollouts=0, waits_for="no GPU", now=NOW)
    assert waiting["reason"] == "no GPU"
    failed = job(JobState.FAILED, reason="diverged")
    over = mirrored(thing(), failed, rollouts=3, waits_for="no GPU", now=NOW)
    assert (over["reason"], over["rolloutReplicas"]) == ("diverged", 0)
    assert over["conditions"][1]["status"] == "False"


@pytest.mark.parametrize("spec", ["", "{", "[]", "{}", '{"stop": null}'])
def test_a_job_with_an_unreadable_spec_still_ends(spec: str) -> None:
    failed = job(JobState.FAILED, reason="its record cannot be read")
    failed = replace(failed, spec=spec)
    new = mirrored(thing(holds=True), failed, rollouts=0, waits_for="", now=NOW)
    assert (new["state"], new["steps"]) == ("failed", 0)
    body = thing(holds=True, deleting=True, jobId="a-1", state="running", steps=20)
    body["status"] = mirrored(body, failed, rollouts=0, waits_for="", now=NOW)
    assert body["status"]["steps"] == 20
    assert next_step(body) is NextStep.RELEASE


@given(st.lists(st.sampled_from(list(JobState)), min_size=1, max_size=8))
def test_times_of_conditions_are_those_of_their_last_change(states: list[JobState]) -> None:
    body, now, changed, before = thing(), NOW, NOW, ""
    for state in states:
        now += timedelta(minutes=1)
        body["status"] = mirrored(body, job(state), rollouts=0, waits_for="", now=now)
        condition = body["status"]["conditions"][1]
        if condition["status"] != before:
            before, changed = condition["status"], now
        assert condition["lastTransitionTime"] == changed.strftime("%Y-%m-%dT%H:%M:%SZ")
    same = mirrored(body, job(states[-1]), rollouts=0, waits_for="", now=now + timedelta(hours=1))
    assert same == body["status"]  # nothing to write
