from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.config import parse_job
from paceline.config.service import ControllerOptions
from paceline.types import JobState, WorkerKind
from paceline_controller.plan import SERVED, LiveJob, plan

OPTIONS = ControllerOptions()


def job(job_id: str = "a-1", state: JobState = JobState.RUNNING, **sections: Any) -> LiveJob:
    raw: dict[str, Any] = {
        "name": "a",
        "model": {"path": "models/tiny"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
        **sections,
    }
    return LiveJob(job_id, state, 0, parse_job(raw))


def test_pools_run_without_jobs() -> None:
    options = ControllerOptions(environment_replicas=2)
    assert list(plan([], options)) == ["environment-0", "environment-1", "reward-0"]


def test_a_job_gets_one_trainer_and_its_rollout_workers() -> None:
    made = plan([job(rollout={"replicas": 2}, trainer={"world_size": 3})], OPTIONS)
    own = [process for process in made.values() if process.job_id]
    assert [p.name for p in own] == ["trainer-a-1", "rollout-a-1-0", "rollout-a-1-1"]
    assert own[0].world_size == 3
    assert {p.job_id for p in own} == {"a-1"}


@st.composite
def jobs(draw: st.DrawFn) -> list[LiveJob]:
    states = draw(st.lists(st.sampled_from(JobState), max_size=5))
    replicas = st.integers(1, 4)
    return [
        job(f"a-{number}", state, rollout={"replicas": draw(replicas)})
        for number, state in enumerate(states)
    ]


@given(jobs(), st.integers(1, 3), st.integers(1, 3))
def test_plan(found: list[LiveJob], environments: int, rewards: int) -> None:
    options = ControllerOptions(environment_replicas=environments, reward_replicas=rewards)
    made = plan(found, options)
    count = {kind: sum(p.kind is kind for p in made.values()) for kind in WorkerKind}
    served = [each for each in found if each.state in SERVED]
    assert count[WorkerKind.ENVIRONMENT] == environments
    assert count[WorkerKind.REWARD] == rewards
    assert count[WorkerKind.TRAINER] == len(served)
    assert count[WorkerKind.ROLLOUT] == sum(each.spec.rollout.replicas for each in served)
    assert {p.job_id for p in made.values()} - {""} == {each.job_id for each in served}
    assert plan(reversed(found), options) == made
