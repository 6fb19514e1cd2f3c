from hypothesis import given
from hypothesis import strategies as st

from paceline import types as t
from paceline import wire

text = st.text(max_size=8)
small = st.integers(min_value=0, max_value=2**31 - 1)
real = st.floats(allow_nan=False, allow_infinity=False, width=32)

spans = st.builds(t.Span, start=small, end=small, source=st.sampled_from(t.Source))
runs = st.builds(t.VersionRun, version=st.integers(-1, 2**40), count=small)
marks = st.builds(t.StepMark, start=small, end=small, reward=real)
transcripts = st.builds(
    t.Transcript,
    tokens=st.lists(small, max_size=5).map(tuple),
    spans=st.lists(spans, max_size=3).map(tuple),
    logprobs=st.lists(real, max_size=5).map(tuple),
    versions=st.lists(runs, max_size=3).map(tuple),
    steps=st.lists(marks, max_size=2).map(tuple),
    parent=st.integers(-1, 5),
    branch_token=small,
)
several = st.lists(transcripts, max_size=2).map(tuple)
samplings = st.builds(
    t.Sampling,
    max_tokens=small,
    temperature=real,
    top_p=real,
    top_k=small,
    min_p=real,
    stop_tokens=st.lists(small, max_size=3).map(tuple),
    stop_strings=st.lists(text, max_size=3).map(tuple),
    seed=st.integers(0, 2**62),
)
scores = st.builds(
    t.Score,
    reward=real,
    parts=st.dictionaries(text, real, max_size=3),
    status=st.sampled_from(t.VerifierStatus),
    raw_answer=text,
    normalised_answer=text,
    detail=text,
)
trajectories = st.builds(
    t.Trajectory,
    group_id=text,
    index=small,
    attempt=small,
    task_id=text,
    purpose=st.sampled_from(t.Purpose),
    transcripts=several,
    score=scores,
    sampling=samplings,
    truncated=st.booleans(),
    topology=text,
    agent_id=text,
    environment_reward=real,
    response_text=text,
    timing=st.builds(t.Timing, real, real, real, real),
    provenance=st.builds(
        t.Provenance,
        environment_worker=text,
        rollout_workers=st.lists(text, max_size=2).map(tuple),
        engine=text,
        precision=text,
        prompt_variant=text,
        variant_meta=text,
        trace=text,
    ),
)
progress = st.builds(
    t.Progress,
    group_id=text,
    index=small,
    attempt=small,
    transcripts=several,
    actions=st.lists(text, max_size=2).map(tuple),
)
assignments = st.builds(
    t.Assignment,
    job_id=text,
    group_id=text,
    indices=st.lists(small, max_size=3).map(tuple),
    attempts=st.lists(small, max_size=3).map(tuple),
    task=st.builds(t.Task, text, text, text, small, text),
    purpose=st.sampled_from(t.Purpose),
    lease_s=real,
    seed=small,
    pinned_version=st.integers(-1, 9),
    progress=st.lists(progress, max_size=2).map(tuple),
)


@given(trajectories)
def test_trajectories_survive_the_wire(noun: t.Trajectory) -> None:
    data = wire.trajectory_to(noun).SerializeToString()
    assert wire.trajectory_from(type(wire.trajectory_to(noun)).FromString(data)) == noun


@given(assignments)
def test_assignments_survive_the_wire(noun: t.Assignment) -> None:
    assert wire.assignment_from(wire.assignment_to(noun)) == noun


def test_workers_versions_and_jobs_survive_the_wire() -> None:
    worker = t.Worker("r-0", t.WorkerKind.ROLLOUT, "h:1", load={"running": 2.0}, pid=7)
    assert wire.worker_from(wire.worker_to(worker)) == worker
    version = t.PolicyVersion(3, 2, parent=1, incarnation=4, digest="ab", num_bytes=9)
    assert wire.version_from(wire.version_to(version)) == version
    status = t.JobStatus("j", "n", "d", t.JobState.RUNNING, eval_reward=0.0, summary={"a": 1})
    job = t.Job(status, "{}", {"config.json": "00"})
    assert wire.job_from(wire.job_to(job)) == job


def test_a_job_without_evaluation_keeps_none() -> None:
    status = t.JobStatus("j", "n", "d", t.JobState.QUEUED)
    assert wire.status_from(wire.status_to(status)).eval_reward is None
