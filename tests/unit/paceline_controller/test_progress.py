"""A job that does not get on says who keeps it, and one that does says nothing."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import JobSpec
from paceline.config.load import parse_job
from paceline.enums import JobState, Phase, WorkerKind
from paceline.errors import UnavailableError
from paceline.platform.telemetry.metrics import Metrics
from paceline.types import Worker, WorkerPhase
from paceline_controller.demand_source import JobDemand
from paceline_controller.jobs.evidence import evidence_of
from paceline_controller.jobs.phases import (
    LATELY,
    LEAST_S,
    LIMITS_S,
    SLACK,
    USUAL_LIMIT_S,
    WorkerPhases,
    words,
)
from paceline_controller.jobs.plan import LiveJob
from paceline_controller.jobs.progress import (
    ABSENT_S,
    BUSY_S,
    FEW_FAILURES,
    FRUITLESS_S,
    LOADING_S,
    LOOK_EVERY_S,
    STAGES,
    TRAINING_S,
    ProgressWatch,
    culprit,
)
from paceline_harness.runtime import FakeClock

SPEC: JobSpec = parse_job(
    {
        "name": "math",
        "model": {"path": "/models/tiny"},
        "tasks": {"environment": "arithmetic", "step_timeout_s": 30.0},
        "reward": [{"kind": "exact"}],
        "stop": {"steps": 10},
    }
)
JOB = LiveJob("math-1", JobState.RUNNING, 3, SPEC)


def waiting(**stages: int) -> Worker:
    """An environment worker whose episodes wait in these stages."""
    return of_jobs((JOB.job_id, stages))


def of_jobs(*jobs: tuple[str, Mapping[str, int]], **load: float) -> Worker:
    phases = tuple(
        WorkerPhase(stage, done=100, total=100 + count, job_id=job_id)
        for job_id, stages in jobs
        for stage, count in stages.items()
    )
    return replace(worker(WorkerKind.ENVIRONMENT), phases=phases, load=load)


def worker(kind: WorkerKind, name: str = "", version: int = -1, **load: float) -> Worker:
    job_id = JOB.job_id if kind in (WorkerKind.TRAINER, WorkerKind.ROLLOUT) else ""
    return Worker(
        worker_id=name or f"{kind}-0",
        kind=kind,
        endpoint="h:1",
        job_id=job_id,
        active_version=version,
        load=load,
    )


TRAINER = worker(WorkerKind.TRAINER, version=3, step_s=10.0)
ROLLOUT = worker(WorkerKind.ROLLOUT, version=3, tokens_generated=1000.0)
ENVIRONMENT = worker(WorkerKind.ENVIRONMENT)
REFUSES = WorkerPhase(Phase.REFUSING_WEIGHTS, 3)


class Source:
    """What the experience service would answer."""

    def __init__(self) -> None:
        self.found: dict[str, Worker] = {}
        self.put(TRAINER, ROLLOUT, ENVIRONMENT)
        self.wants = JobDemand(
            job_id=JOB.job_id, step=3, trainer_wait_s=1.0, leased=16, sampled_tokens=500
        )
        self.away = False

    def put(self, *workers: Worker) -> None:
        self.found |= {each.worker_id: each for each in workers}

    def change(self, **fields: Any) -> None:
        self.wants = replace(self.wants, **fields)

    async def workers(self) -> Sequence[Worker]:
        if self.away:
            raise UnavailableError("experience")
        return list(self.found.values())

    async def demand(self) -> Mapping[str, JobDemand]:
        return {JOB.job_id: self.wants}


def change(
    source: Source, name: str, *, load: Mapping[str, float] | None = None, **fields: int
) -> None:
    """Replace fields of a worker, and figures of its load."""
    known = source.found[name]
    source.put(replace(known, load={**known.load, **(load or {})}, **fields))


class Watched:
    """A watch with its source and clock."""

    def __init__(self) -> None:
        self.source, self.clock = Source(), FakeClock()
        self.metrics = Metrics()
        self.watch = ProgressWatch(
            source=self.source,
            metrics=self.metrics,
            clock=self.clock,
            wall=lambda: self.clock() - 1000.0,
        )

    @property
    def quiet_s(self) -> float:
        """As the metric has it; -1: there is none."""
        labels = {"job": JOB.job_id}
        value = self.metrics.registry.get_sample_value("paceline_no_progress_seconds", labels)
        return -1.0 if value is None else value

    async def after(self, seconds: float, job: LiveJob = JOB) -> str:
        """The reason after so many seconds, looked at as often as the reconciler does."""
        end = self.clock() + seconds
        while True:
            await self.watch.look([job])
            if self.clock() >= end:
                return self.watch.reason(job.job_id)
            self.clock.pass_s(min(LOOK_EVERY_S, end - self.clock()))


KINDS: dict[str, tuple[Callable[[Source], object], str]] = {
    "rollout cannot start": (
        lambda s: s.found.pop("rollout-0"),
        "rollout: no worker is in the roster",
    ),
    "rollout refuses its weights": (
        lambda s: s.put(replace(ROLLOUT, active_version=-1)),
        "rollout: none of 1 workers serves weights (the trainer has published version 3)",
    ),
    "rollout does not take new weights": (
        lambda s: (s.put(replace(ROLLOUT, active_version=2)), s.change(leased=0)),
        "rollout: 1 of 1 workers have not taken version 3",
    ),
    "rollout serves what is too old": (
        lambda s: s.put(replace(ROLLOUT, active_version=2, phases=(REFUSES,)), waiting(room=16)),
        "rollout: 1 of 1 workers have not taken version 3; rollout-0 is refusing weights of "
        "version 3",
    ),
    "rollout hangs": (
        lambda s: s.put(waiting(generate=15, step=1)),
        "rollout: episodes wait for tokens",
    ),
    "reward hangs": (
        lambda s: s.put(waiting(score=16)),
        "reward: episodes wait for their scores",
    ),
    "environment hangs": (
        lambda s: s.put(waiting(step=16)),
        "environment: episodes are in a step of their world",
    ),
    "experience does not store": (
        lambda s: s.put(waiting(submit=16)),
        "experience: episodes wait to be stored",
    ),
    "environment cannot start": (
        lambda s: s.found.pop("environment-0"),
        "environment: no worker is in the roster",
    ),
    "environment takes nothing": (
        lambda s: s.change(queued=8, leased=0),
        "environment: no worker takes the episodes that are queued",
    ),
    "environment asks for nothing": (
        lambda s: s.change(headroom_groups=4, leased=0),
        "environment: no worker asks for tasks",
    ),
    "nothing may be admitted": (
        lambda s: s.change(leased=0),
        "experience: no episode is open and none is admitted ",
    ),
    "environment worker was lost with its episodes": (
        lambda s: None,
        "environment: episodes are leased, and no worker has them",
    ),
    "trainer is gone": (
        lambda s: s.found.pop("trainer-0"),
        "trainer: none is in the roster",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_status_names_the_culprit(kind: str) -> None:
    watched = Watched()
    spoil, expected = KINDS[kind]
    spoil(watched.source)
    if kind == "rollout does not take new weights":
        watched.source.change(leased=0)
    seen = evidence_of(JOB, await watched.source.workers(), watched.source.wants)
    served = any(each.active_version >= 0 for each in seen.rollouts)
    bound_s = culprit(seen, WorkerPhases(), served=served).bound_s
    assert ABSENT_S <= bound_s <= LOADING_S
    assert await watched.after(bound_s - 1) == ""
    reason = await watched.after(1 + LOOK_EVERY_S)
    assert reason.startswith(f"no progress since 00:00:00 UTC: {expected}")
    # Nothing is written again and again while it lasts.
    assert await watched.after(1000) == reason
    assert 1000 < watched.quiet_s < 1000 + bound_s + 2 * LOOK_EVERY_S
    watched.source.change(step=4)
    assert await watched.after(LOOK_EVERY_S) == ""
    assert watched.quiet_s == 0.0
    watched.watch.close()
    assert watched.quiet_s == -1.0


async def test_a_trainer_that_has_its_batch_has_more_time() -> None:
    watched = Watched()
    watched.source.change(trainer_wait_s=0.0)
    assert await watched.after(TRAINING_S - 1) == ""
    reason = await watched.after(1 + LOOK_EVERY_S)
    assert reason.endswith("trainer: it does not finish step 4")


async def test_work_for_attempts_that_all_fail_is_no_progress() -> None:
    watched, reason = Watched(), ""
    for second in range(int(BUSY_S + 2 * LOOK_EVERY_S)):
        change(watched.source, "rollout-0", load={"tokens_generated": 2000 + second})
        watched.source.change(
            failed_attempts=2 * (second + 1), last_failure=f"scoring: no such file {second}"
        )
        reason = await watched.after(1)
    assert re.fullmatch(r".*every attempt of an episode fails: scoring: no such file \d+", reason)
    watched.source.change(failed_attempts=1000, last_failure="scoring: other words")
    assert await watched.after(LOOK_EVERY_S) == reason
    watched.source.change(sampled_tokens=1000)
    assert await watched.after(LOOK_EVERY_S) == ""


@pytest.mark.parametrize("failed", [1, FEW_FAILURES - 1, 64])
async def test_attempts_that_fail_once_are_no_reason(failed: int) -> None:
    """Nor all of a worker that is lost, while other episodes go on."""
    watched = Watched()
    await watched.after(10)
    watched.source.change(failed_attempts=failed, last_failure="the worker is gone")
    for second in range(300):
        change(watched.source, "rollout-0", load={"tokens_generated": 2000 + second})
        assert await watched.after(1) == ""


async def test_workers_that_load_the_model_for_the_first_time_have_longer() -> None:
    watched = Watched()
    change(watched.source, "rollout-0", active_version=-1)
    watched.source.change(leased=0)
    assert await watched.after(LOADING_S - 1) == ""
    change(watched.source, "rollout-0", active_version=3)
    assert await watched.after(LOOK_EVERY_S) == ""
    change(watched.source, "rollout-0", active_version=-1)
    assert "none of 1 workers serves" in await watched.after(ABSENT_S + 2 * LOOK_EVERY_S)


async def test_new_weights_may_spread_for_a_while() -> None:
    watched = Watched()
    await watched.after(0)
    change(watched.source, "trainer-0", active_version=4)
    watched.source.change(leased=0)
    assert await watched.after(LOADING_S - 1) == ""
    assert "have not taken version 4" in await watched.after(2 * LOOK_EVERY_S)


async def test_a_step_that_hangs_is_noticed_though_its_clock_runs() -> None:
    watched, reason = Watched(), ""
    watched.source.change(trainer_wait_s=0.0)
    for second in range(0, int(TRAINING_S) + 10, 10):
        change(watched.source, "trainer-0", load={"step_s": second})
        reason = await watched.after(10)
    assert "does not finish step 4" in reason


async def test_what_episodes_of_other_jobs_wait_for_is_not_said() -> None:
    watched = Watched()
    others = ("other-1", {"score": 500})
    watched.source.put(of_jobs(others, (JOB.job_id, {"generate": 3, "room": 3})))
    reason = await watched.after(BUSY_S + LOOK_EVERY_S)
    assert reason.endswith("rollout: episodes wait for room on a worker")


async def test_slots_that_other_jobs_have_are_no_fault_of_the_environment() -> None:
    watched = Watched()
    watched.source.change(leased=0)
    watched.source.change(queued=8)
    watched.source.put(of_jobs(("other-1", {"generate": 64}), open=64.0, slots=64.0))
    reason = await watched.after(BUSY_S + LOOK_EVERY_S)
    assert reason.endswith("environment: other jobs have all of its 64 slots")


async def test_the_worker_that_has_the_requests_is_named() -> None:
    watched = Watched()
    busy = worker(WorkerKind.ROLLOUT, version=3, open=12)
    idle = worker(WorkerKind.ROLLOUT, "rollout-1", version=3, open=0)
    watched.source.put(waiting(generate=8), busy, idle)
    reason = await watched.after(BUSY_S + LOOK_EVERY_S)
    assert reason.endswith("rollout: episodes wait for tokens; rollout-0 has 12 requests")


async def test_the_load_of_shared_workers_is_not_told() -> None:
    watched = Watched()
    watched.source.put(waiting(score=8), worker(WorkerKind.REWARD, "reward-1", pending=700))
    reason = await watched.after(BUSY_S + LOOK_EVERY_S)
    assert reason.endswith("reward: episodes wait for their scores")


@pytest.mark.parametrize("stage", ["step", "score"])
async def test_an_evaluation_in_progress_has_the_time_of_its_episodes(stage: str) -> None:
    watched = Watched()
    watched.source.change(leased=0)
    watched.source.change(measuring=True, eval_open=8)
    watched.source.put(waiting(**{stage: 8}))
    assert await watched.after(BUSY_S - 1) == ""
    assert STAGES[Phase(stage)] in await watched.after(2 * LOOK_EVERY_S)


async def test_an_evaluation_that_hangs_is_noticed_though_the_trainer_has_a_batch() -> None:
    watched = Watched()
    watched.source.change(trainer_wait_s=0.0)
    watched.source.change(measuring=True)
    watched.source.put(waiting(generate=4))
    assert (await watched.after(BUSY_S + LOOK_EVERY_S)).endswith("episodes wait for tokens")


def evaluating(stage: str, *, done: int = 0, left: int = 4) -> Worker:
    """An environment worker that has episodes for training, and some of an evaluation."""
    phases = (
        WorkerPhase("generate", done=100, total=108, job_id=JOB.job_id),
        WorkerPhase(stage, 3, done=done, total=done + left, job_id=JOB.job_id),
    )
    return replace(ENVIRONMENT, phases=phases)


HANGING: dict[str, tuple[Callable[[Source], object], str]] = {
    "rollout": (
        lambda s: s.put(evaluating("generate")),
        "rollout: episodes wait for tokens",
    ),
    "rollout, without that version": (
        lambda s: s.put(evaluating("room"), replace(ROLLOUT, active_version=4, phases=(REFUSES,))),
        "rollout: no worker serves version 3; rollout-0 is refusing weights of version 3",
    ),
    "reward": (lambda s: s.put(evaluating("score")), "reward: episodes wait for their scores"),
    "world": (
        lambda s: s.put(evaluating("step")),
        "environment: episodes are in a step of their world",
    ),
    "environment": (lambda s: s.put(ENVIRONMENT), "environment: no worker has its episodes"),
}


@pytest.mark.parametrize("kind", HANGING)
@given(moves=st.lists(st.sampled_from(["done", "open"]), max_size=4), data=st.data())
async def test_an_evaluation_that_hangs_is_named_though_the_job_gets_on(
    kind: str, moves: list[str], data: st.DataObject
) -> None:
    """Not while its episodes get tokens, or tasks of it are measured."""
    watched = Watched()
    watched.source.wants = replace(
        watched.source.wants, measuring=True, eval_open=8, eval_tasks=64, eval_version=3
    )

    def measured() -> None:
        wants = watched.source.wants
        watched.source.wants = replace(wants, eval_open=wants.eval_open - 1)

    async def trains(seconds: float) -> str:
        reason = ""
        for _ in range(0, int(seconds), int(LOOK_EVERY_S)):
            wants = watched.source.wants
            watched.source.wants = replace(
                wants, step=wants.step + 1, sampled_tokens=wants.sampled_tokens + 100
            )
            reason = await watched.after(LOOK_EVERY_S)
        return reason

    spoil, expected = HANGING[kind]
    for number, move in enumerate(moves, 1):
        if move == "open":
            measured()
        watched.source.put(evaluating("generate", done=number))
        assert await trains(data.draw(st.integers(2, int(BUSY_S - 2 * LOOK_EVERY_S)))) == ""
    spoil(watched.source)
    assert await trains(BUSY_S - 2 * LOOK_EVERY_S) == ""
    reason = await trains(LOADING_S)
    left = f"{8 - moves.count('open')} of 64 tasks are open"
    said = rf"no progress of the evaluation of version 3 \({left}\) since \S+ UTC: "
    assert re.fullmatch(said + re.escape(expected), reason)
    measured()
    assert await trains(LOOK_EVERY_S) == ""


async def test_filters_that_drop_everything_are_named() -> None:
    watched = Watched()
    watched.source.wants.filtered["zero_variance"] = 7  # before
    await watched.after(0)
    for second in range(0, int(FRUITLESS_S) - 10, 10):
        watched.source.change(sampled_tokens=1000 + second)
        watched.source.wants.filtered["zero_variance"] = 8 + second
        assert await watched.after(10) == ""
    watched.source.change(sampled_tokens=watched.source.wants.sampled_tokens + 1)
    reason = await watched.after(10 + LOOK_EVERY_S)
    dropped = r"filters drop every group, most as zero_variance \(\d+ so far\)"
    assert re.fullmatch(f"no batch since 00:00:00 UTC: {dropped}", reason)
    watched.source.change(accepted_groups=1)
    assert await watched.after(LOOK_EVERY_S) == ""
    for second in range(0, int(2 * FRUITLESS_S), 10):  # nothing was dropped since
        watched.source.change(sampled_tokens=watched.source.wants.sampled_tokens + second + 1)
        assert await watched.after(10) == ""


async def test_a_long_step_of_a_world_has_the_time_that_its_job_allows() -> None:
    watched = Watched()
    tasks = SPEC.tasks.model_copy(update={"step_timeout_s": 600.0})
    patient = replace(JOB, spec=SPEC.model_copy(update={"tasks": tasks}))
    watched.source.put(waiting(step=16))
    assert await watched.after(599.0, patient) == ""
    assert "episodes are in a step" in await watched.after(1 + LOOK_EVERY_S, patient)


async def test_what_is_not_known_is_not_said() -> None:
    watched = Watched()
    reason = await watched.after(BUSY_S + LOOK_EVERY_S)
    watched.source.away = True
    assert await watched.after(100) == reason


@pytest.mark.parametrize("state", [s for s in JobState if s is not JobState.RUNNING])
async def test_jobs_that_do_not_run_are_left_alone(state: JobState) -> None:
    watched = Watched()
    await watched.after(BUSY_S + LOOK_EVERY_S)
    assert await watched.after(10_000, replace(JOB, state=state)) == ""
    # It has its time again when it goes on.
    assert await watched.after(BUSY_S - 1) == ""


def at(kind: WorkerKind, phase: WorkerPhase, version: int = -1, pid: int = 0) -> Worker:
    return replace(worker(kind, version=version), phases=(phase,), pid=pid)


@dataclass(frozen=True)
class Case:
    """A worker in a phase, and how the job is meanwhile."""

    kind: WorkerKind
    phase: Phase
    version: int = -1  # of its weights
    state: JobState = JobState.RUNNING

    def put(self, source: Source, done: float, number: int = 4, pid: int = 0) -> None:
        waits = self.kind is WorkerKind.ROLLOUT
        source.change(trainer_wait_s=1.0 if waits else 0.0, leased=0)
        phase = WorkerPhase(self.phase, number, done, total=14.2e9)
        source.put(at(self.kind, phase, self.version, pid))


OF_TRAINERS = (
    Phase.STEPPING,
    Phase.COMMITTING,
    Phase.CHECKPOINTING,
    Phase.PUBLISHING,
    Phase.LOADING_CHECKPOINT,
    Phase.LOADING_MODEL,
    Phase.DOWNLOADING_MODEL,
)
OF_ROLLOUTS = (
    Phase.STARTING_ENGINE,
    Phase.WAITING_FOR_WEIGHTS,
    Phase.RECEIVING_WEIGHTS,
    Phase.LOADING_WEIGHTS,
    Phase.CHECKING_WEIGHTS,
    Phase.REFUSING_WEIGHTS,
)
CASES = [
    *(Case(WorkerKind.TRAINER, phase, 3) for phase in OF_TRAINERS),
    *(Case(WorkerKind.TRAINER, phase, -1, JobState.STARTING) for phase in OF_TRAINERS[-3:]),
    *(Case(WorkerKind.ROLLOUT, phase, -1) for phase in OF_ROLLOUTS),
    *(Case(WorkerKind.ROLLOUT, phase, 2) for phase in OF_ROLLOUTS[2:]),  # has older weights
]


@given(case=st.sampled_from(CASES), data=st.data())
async def test_a_phase_that_moves_is_left_alone_and_one_that_stands_is_named(
    case: Case, data: st.DataObject
) -> None:
    """Also after retries, in which a worker gets as far as before and no further."""
    watched, job = Watched(), replace(JOB, state=case.state)
    pauses = st.lists(st.integers(2, int(LEAST_S) - 4), max_size=6)
    done, first_s = 1e9, watched.clock()
    case.put(watched.source, done)
    assert await watched.after(0, job) == ""
    for pause_s in data.draw(pauses):
        assert await watched.after(pause_s, job) == ""
        done, first_s = done + 1e8, watched.clock()
        case.put(watched.source, done)
    limit_s = LIMITS_S.get(case.phase, USUAL_LIMIT_S)
    reason = ""
    for pause_s in data.draw(pauses):  # it begins again, and stops where it was before
        reason = await watched.after(pause_s, job)
        case.put(watched.source, data.draw(st.sampled_from([0.0, 1e9, done])))
    case.put(watched.source, done)
    reason = await watched.after(limit_s + 2 * LOOK_EVERY_S, job)
    assert re.match(r"no progress since \d\d:\d\d:\d\d UTC: ", reason)
    assert f"{case.kind}: " in reason
    assert f"; {case.kind}-0 is {case.phase} 4" in reason
    if case.phase is Phase.RECEIVING_WEIGHTS:
        assert f"{done / 1e9:.1f} of 14.2 GB" in reason
    case.put(watched.source, done + 1e8)
    assert await watched.after(LOOK_EVERY_S, job) == ""
    assert watched.clock() > first_s


async def test_a_phase_that_was_short_before_has_less_time() -> None:
    watched = Watched()
    for done in range(1, 10):
        Case(WorkerKind.TRAINER, Phase.STEPPING, 3).put(watched.source, done)
        assert await watched.after(LOOK_EVERY_S) == ""
    assert await watched.after(LEAST_S - 2 * LOOK_EVERY_S) == ""
    # A micro-batch may seem to take the time between two looks, or twice that.
    reason = await watched.after(2 * SLACK * LOOK_EVERY_S - LEAST_S + 3 * LOOK_EVERY_S)
    assert reason.endswith(
        "trainer: it does not finish step 4; trainer-0 is training step 4, 9 micro-batches done"
    )


async def test_a_first_step_that_compiles_says_nothing_about_the_others() -> None:
    watched = Watched()
    for number in range(LATELY + 2):
        Case(WorkerKind.TRAINER, Phase.STEPPING, 3).put(watched.source, 0, number)
        assert await watched.after(LOOK_EVERY_S if number else 100.0) == ""
    assert await watched.after(LEAST_S - 2 * LOOK_EVERY_S) == ""
    assert await watched.after(2 * SLACK * LOOK_EVERY_S) != ""


@pytest.mark.parametrize(("longest_s", "limit_s"), [(0.01, LEAST_S), (20.0, SLACK * 20.0)])
async def test_a_step_that_hangs_after_some_too_short_to_be_seen_is_named(
    longest_s: float, limit_s: float
) -> None:
    watched = Watched()
    phase = WorkerPhase(Phase.STEPPING, 9, longest_s=longest_s)
    Case(WorkerKind.TRAINER, Phase.STEPPING, 3).put(watched.source, 0)
    watched.source.put(at(WorkerKind.TRAINER, phase, version=3))
    assert await watched.after(limit_s - LOOK_EVERY_S) == ""
    assert "trainer-0 is training step 9" in await watched.after(3 * LOOK_EVERY_S)


async def test_a_long_first_phase_is_left_alone() -> None:
    watched = Watched()
    case = Case(WorkerKind.TRAINER, Phase.STEPPING, 3)
    case.put(watched.source, 0)
    assert await watched.after(TRAINING_S - LOOK_EVERY_S) == ""


@pytest.mark.parametrize(
    ("done", "total", "expected"),
    [(3.1e9, 14.2e9, "3.1 of 14.2 GB"), (0, 999, "0.0 of 999.0 B"), (5e5, 2e6, "0.5 of 2.0 MB")],
)
def test_how_far_it_is(done: float, total: float, expected: str) -> None:
    phase = WorkerPhase(Phase.RECEIVING_WEIGHTS, 3, done, total)
    assert words(phase) == f"receiving weights of version 3, {expected}"


async def test_phases_of_other_releases_are_unknown() -> None:
    watched = Watched()
    watched.source.put(at(WorkerKind.ROLLOUT, WorkerPhase("dreaming\nof tokens"), version=3))
    reason = await watched.after(BUSY_S + LOOK_EVERY_S)
    assert "dreaming" not in reason


MOVES: dict[str, Callable[[Source, int], object]] = {
    "step": lambda s, n: s.change(step=100 + n),
    "groups": lambda s, n: s.change(accepted_groups=n),
    "episodes": lambda s, n: s.change(sampled_tokens=1000 + n),
    "tokens": lambda s, n: change(s, "rollout-0", load={"tokens_generated": n}),
    "weights": lambda s, n: change(s, "rollout-0", active_version=100 + n),
    "training": lambda s, n: change(s, "trainer-0", load={"tokens": n}),
    "restart": lambda s, n: change(s, "trainer-0", pid=n),
}
IDLE: dict[str, Callable[[Source, int], object]] = {
    "load": lambda s, n: change(s, "environment-0", load={"waiting_step": n, "cpu_s": n}),
    "queue": lambda s, n: s.change(queued=n),
    "waiting": lambda s, n: s.change(trainer_wait_s=1.0 + n),
    "reload": lambda s, n: change(s, "rollout-0", load={"swap_s": n}),
    "clock": lambda s, n: change(s, "trainer-0", load={"step_s": n, "checkpoint_s": n}),
}


@given(data=st.data())
async def test_a_reason_is_given_exactly_when_nothing_has_moved_for_the_bound(
    data: st.DataObject,
) -> None:
    watched = Watched()
    await watched.after(0)
    moved_s = watched.clock()
    for n in range(1, data.draw(st.integers(1, 12))):
        pause_s = data.draw(st.integers(1, int(BUSY_S)))
        reason = await watched.after(pause_s)
        quiet_s = watched.clock() - moved_s
        if quiet_s >= BUSY_S + LOOK_EVERY_S:
            assert reason.startswith("no progress since ")
        elif quiet_s < BUSY_S:
            assert reason == ""
        name = data.draw(st.sampled_from([*MOVES, *IDLE]))
        (MOVES | IDLE)[name](watched.source, n)
        if name in MOVES:
            await watched.after(LOOK_EVERY_S)
            moved_s = watched.clock()
            assert watched.watch.reason(JOB.job_id) == ""


def test_an_endpoint_that_is_asked_again_is_named_with_its_words() -> None:
    """Although most episodes wait for their turn: nobody is asked before."""
    outside = {"path": "small", "endpoint": {"name": "lab"}}
    spec = parse_job({**SPEC.model_dump(mode="json"), "kind": "eval", "model": outside})
    phases = tuple(
        WorkerPhase(stage, total=count, job_id=JOB.job_id, detail=detail)
        for stage, count, detail in (
            *((Phase.ROOM, 90, ""), (Phase.GENERATE, 4, "")),
            (Phase.REPEAT, 3, "HTTP 429: slow down"),
        )
    )
    demand = JobDemand(measuring=True, eval_open=97)
    seen = replace(ENVIRONMENT, phases=phases)
    found = culprit(evidence_of(replace(JOB, spec=spec), [seen], demand), WorkerPhases())
    assert (found.bound_s, found.detail) == (ABSENT_S, "; HTTP 429: slow down")
    assert found.why.startswith("endpoint: it refuses requests")
    calm = replace(ENVIRONMENT, phases=phases[:2])
    found = culprit(evidence_of(replace(JOB, spec=spec), [calm], demand), WorkerPhases())
    assert found.why == "endpoint: episodes wait for its answers"
