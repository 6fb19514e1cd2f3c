"""Nouns ↔ messages."""

from __future__ import annotations

import json
from dataclasses import asdict

from paceline import types as t
from paceline.errors import InvalidError
from paceline.v1 import types_pb2 as pb


def task_to(noun: t.Task) -> pb.Task:
    """Task as a message."""
    return pb.Task(
        task_id=noun.task_id,
        environment=noun.environment,
        payload=noun.payload,
        seed=noun.seed,
        domain=noun.domain,
    )


def task_from(message: pb.Task) -> t.Task:
    """Task from a message."""
    return t.Task(
        task_id=message.task_id,
        environment=message.environment,
        payload=message.payload,
        seed=message.seed,
        domain=message.domain,
    )


def sampling_to(noun: t.Sampling) -> pb.Sampling:
    """Sampling as a message."""
    return pb.Sampling(
        max_tokens=noun.max_tokens,
        temperature=noun.temperature,
        top_p=noun.top_p,
        top_k=noun.top_k,
        min_p=noun.min_p,
        stop_tokens=noun.stop_tokens,
        stop_strings=noun.stop_strings,
        seed=noun.seed,
    )


def sampling_from(message: pb.Sampling) -> t.Sampling:
    """Sampling from a message."""
    return t.Sampling(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        stop_tokens=tuple(message.stop_tokens),
        stop_strings=tuple(message.stop_strings),
        seed=message.seed,
    )


def version_runs_to(runs: tuple[t.VersionRun, ...]) -> list[pb.VersionRun]:
    """Version runs as messages."""
    return [pb.VersionRun(version=run.version, count=run.count) for run in runs]


def version_runs_from(messages: object) -> tuple[t.VersionRun, ...]:
    """Version runs from messages."""
    runs: list[pb.VersionRun] = list(messages)  # type: ignore[call-overload]
    return tuple(t.VersionRun(version=m.version, count=m.count) for m in runs)


def transcript_to(noun: t.Transcript) -> pb.Transcript:
    """Transcript as a message."""
    return pb.Transcript(
        tokens=noun.tokens,
        spans=[pb.Span(start=s.start, end=s.end, source=s.source) for s in noun.spans],
        logprobs=noun.logprobs,
        versions=version_runs_to(noun.versions),
        steps=[
            pb.StepMark(
                start=s.start,
                end=s.end,
                reward=s.reward,
                matched_expert=s.matched_expert,
                patched=s.patched,
                first_error=s.first_error,
            )
            for s in noun.steps
        ],
        parent=noun.parent,
        branch_token=noun.branch_token,
    )


def transcript_from(message: pb.Transcript) -> t.Transcript:
    """Transcript from a message."""
    return t.Transcript(
        tokens=tuple(message.tokens),
        spans=tuple(t.Span(s.start, s.end, t.Source(s.source)) for s in message.spans),
        logprobs=tuple(message.logprobs),
        versions=version_runs_from(message.versions),
        steps=tuple(
            t.StepMark(s.start, s.end, s.reward, s.matched_expert, s.patched, s.first_error)
            for s in message.steps
        ),
        parent=message.parent,
        branch_token=message.branch_token,
    )


def score_to(noun: t.Score) -> pb.Score:
    """Score as a message."""
    return pb.Score(
        reward=noun.reward,
        parts=noun.parts,
        status=noun.status,
        raw_answer=noun.raw_answer,
        normalised_answer=noun.normalised_answer,
        detail=noun.detail,
    )


def score_from(message: pb.Score) -> t.Score:
    """Score from a message."""
    return t.Score(
        reward=message.reward,
        parts=dict(message.parts),
        status=t.VerifierStatus(message.status or "ok"),
        raw_answer=message.raw_answer,
        normalised_answer=message.normalised_answer,
        detail=message.detail,
    )


def trajectory_to(noun: t.Trajectory) -> pb.Trajectory:
    """Trajectory as a message."""
    timing, origin = noun.timing, noun.provenance
    return pb.Trajectory(
        group_id=noun.group_id,
        index=noun.index,
        attempt=noun.attempt,
        task_id=noun.task_id,
        purpose=noun.purpose,
        transcripts=[transcript_to(x) for x in noun.transcripts],
        score=score_to(noun.score),
        sampling=sampling_to(noun.sampling),
        truncated=noun.truncated,
        topology=noun.topology,
        agent_id=noun.agent_id,
        environment_reward=noun.environment_reward,
        response_text=noun.response_text,
        timing=pb.Timing(
            generate_s=timing.generate_s,
            environment_s=timing.environment_s,
            reward_s=timing.reward_s,
            total_s=timing.total_s,
        ),
        provenance=pb.Provenance(
            environment_worker=origin.environment_worker,
            rollout_workers=origin.rollout_workers,
            engine=origin.engine,
            precision=origin.precision,
            prompt_variant=origin.prompt_variant,
            variant_meta=origin.variant_meta,
            trace=origin.trace,
        ),
    )


def trajectory_from(message: pb.Trajectory) -> t.Trajectory:
    """Trajectory from a message."""
    timing, origin = message.timing, message.provenance
    return t.Trajectory(
        group_id=message.group_id,
        index=message.index,
        attempt=message.attempt,
        task_id=message.task_id,
        purpose=t.Purpose(message.purpose),
        transcripts=tuple(transcript_from(x) for x in message.transcripts),
        score=score_from(message.score),
        sampling=sampling_from(message.sampling),
        truncated=message.truncated,
        topology=message.topology,
        agent_id=message.agent_id,
        environment_reward=message.environment_reward,
        response_text=message.response_text,
        timing=t.Timing(timing.generate_s, timing.environment_s, timing.reward_s, timing.total_s),
        provenance=t.Provenance(
            environment_worker=origin.environment_worker,
            rollout_workers=tuple(origin.rollout_workers),
            engine=origin.engine,
            precision=origin.precision,
            prompt_variant=origin.prompt_variant,
            variant_meta=origin.variant_meta,
            trace=origin.trace,
        ),
    )


def progress_to(noun: t.Progress) -> pb.Progress:
    """Progress as a message."""
    return pb.Progress(
        group_id=noun.group_id,
        index=noun.index,
        attempt=noun.attempt,
        transcripts=[transcript_to(x) for x in noun.transcripts],
        actions=noun.actions,
    )


def progress_from(message: pb.Progress) -> t.Progress:
    """Progress from a message."""
    return t.Progress(
        group_id=message.group_id,
        index=message.index,
        attempt=message.attempt,
        transcripts=tuple(transcript_from(x) for x in message.transcripts),
        actions=tuple(message.actions),
    )


def assignment_to(noun: t.Assignment) -> pb.Assignment:
    """Assignment as a message."""
    return pb.Assignment(
        job_id=noun.job_id,
        group_id=noun.group_id,
        indices=noun.indices,
        attempts=noun.attempts,
        task=task_to(noun.task),
        purpose=noun.purpose,
        lease_s=noun.lease_s,
        seed=noun.seed,
        pinned_version=noun.pinned_version,
        min_version=noun.min_version,
        progress=[progress_to(p) for p in noun.progress],
        traces=noun.traces,
    )


def assignment_from(message: pb.Assignment) -> t.Assignment:
    """Assignment from a message."""
    return t.Assignment(
        job_id=message.job_id,
        group_id=message.group_id,
        indices=tuple(message.indices),
        attempts=tuple(message.attempts),
        task=task_from(message.task),
        purpose=t.Purpose(message.purpose),
        lease_s=message.lease_s,
        seed=message.seed,
        pinned_version=message.pinned_version,
        min_version=message.min_version,
        progress=tuple(progress_from(p) for p in message.progress),
        traces=tuple(message.traces),
    )


def worker_to(noun: t.Worker) -> pb.Worker:
    """Worker as a message."""
    return pb.Worker(
        worker_id=noun.worker_id,
        kind=noun.kind,
        endpoint=noun.endpoint,
        site=noun.site,
        job_id=noun.job_id,
        active_version=noun.active_version,
        weights_endpoint=noun.weights_endpoint,
        load=noun.load,
        pid=noun.pid,
        pool=noun.pool,
    )


def _worker_kind(name: str) -> t.WorkerKind:
    try:
        return t.WorkerKind(name)
    except ValueError:
        known = ", ".join(t.WorkerKind)
        raise InvalidError(f"kind: {name!r} is no kind of worker; allowed: {known}") from None


def worker_from(message: pb.Worker) -> t.Worker:
    """Worker from a message."""
    return t.Worker(
        worker_id=message.worker_id,
        kind=_worker_kind(message.kind),
        endpoint=message.endpoint,
        site=message.site,
        job_id=message.job_id,
        active_version=message.active_version,
        weights_endpoint=message.weights_endpoint,
        load=dict(message.load),
        pid=message.pid,
        pool=message.pool,
    )


def version_to(noun: t.PolicyVersion) -> pb.PolicyVersion:
    """Policy version as a message."""
    return pb.PolicyVersion(
        version=noun.version,
        step=noun.step,
        parent=noun.parent,
        incarnation=noun.incarnation,
        digest=noun.digest,
        num_bytes=noun.num_bytes,
    )


def version_from(message: pb.PolicyVersion) -> t.PolicyVersion:
    """Policy version from a message."""
    return t.PolicyVersion(
        version=message.version,
        step=message.step,
        parent=message.parent,
        incarnation=message.incarnation,
        digest=message.digest,
        num_bytes=message.num_bytes,
    )


def status_to(noun: t.JobStatus) -> pb.JobStatus:
    """Job status as a message."""
    return pb.JobStatus(
        job_id=noun.job_id,
        name=noun.name,
        tenant=noun.tenant,
        state=noun.state,
        reason=noun.reason,
        step=noun.step,
        version=noun.version,
        incarnation=noun.incarnation,
        eval_reward=noun.eval_reward,
        eval_step=noun.eval_step,
        summary_json=json.dumps(noun.summary) if noun.summary else "",
        created_s=noun.created_s,
        running_s=noun.running_s,
        tracking=map(tracker_to, noun.tracking),
    )


def status_from(message: pb.JobStatus) -> t.JobStatus:
    """Job status from a message."""
    return t.JobStatus(
        job_id=message.job_id,
        name=message.name,
        tenant=message.tenant,
        state=t.JobState(message.state),
        reason=message.reason,
        step=message.step,
        version=message.version,
        incarnation=message.incarnation,
        eval_reward=message.eval_reward if message.HasField("eval_reward") else None,
        eval_step=message.eval_step if message.HasField("eval_step") else None,
        summary=json.loads(message.summary_json or "{}"),
        created_s=message.created_s,
        running_s=message.running_s,
        tracking=tuple(map(tracker_from, message.tracking)),
    )


def tracker_to(noun: t.TrackerStatus) -> pb.TrackerStatus:
    """State of an experiment tracker as a message."""
    return pb.TrackerStatus(**asdict(noun))


def tracker_from(message: pb.TrackerStatus) -> t.TrackerStatus:
    """State of an experiment tracker from a message."""
    return t.TrackerStatus(
        name=message.name,
        kind=message.kind,
        state=message.state,
        rows=message.rows,
        url=message.url,
        detail=message.detail,
    )


def job_to(noun: t.Job) -> pb.Job:
    """Job as a message."""
    return pb.Job(status=status_to(noun.status), spec_json=noun.spec, artefacts=noun.artefacts)


def job_from(message: pb.Job) -> t.Job:
    """Job from a message."""
    return t.Job(
        status=status_from(message.status),
        spec=message.spec_json,
        artefacts=dict(message.artefacts),
    )
