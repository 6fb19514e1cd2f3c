from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.config import parse_job
from paceline.config.service import ControllerOptions
from paceline.enums import JobState, WorkerKind
from paceline_controller.jobs.plan import SERVED, LiveJob, plan, pools_of, replicas_of

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
    made = plan([], options)
    assert list(made) == ["environment", "reward"]
    names = [each.name for each in replicas_of(made.values())]
    assert names == ["environment-0", "environment-1", "reward-0"]


def test_a_job_gets_one_trainer_and_its_rollout_workers() -> None:
    made = plan([job(rollout={"replicas": 2}, trainer={"world_size": 3})], OPTIONS)
    own = [process for process in replicas_of(made.values()) if process.job_id]
    assert [p.name for p in own] == ["trainer-a-1", "rollout-a-1-0", "rollout-a-1-1"]
    assert own[0].world_size == 3
    assert {p.job_id for p in own} == {"a-1"}


POOLS = ControllerOptions.model_validate(
    {
        "pools": {
            "default": {"cost": 4},
            "fast": {"cost": 6, "speed": 2},
            "spot": {"cost": 1, "spot": True},
        }
    }
)


def test_rollout_workers_start_in_the_pool_with_the_cheapest_tokens() -> None:
    assert pools_of(job().spec, POOLS) == ["spot", "fast", "default"]
    made = plan([job(rollout={"replicas": 3})], POOLS)
    assert made["rollout-a-1-spot"].replicas == 3
    assert set(made) == {"environment", "reward", "trainer-a-1", "rollout-a-1-spot"}


def test_a_job_may_choose_its_pools() -> None:
    made = plan([job(rollout={"pools": ["default", "fast"]})], POOLS)
    assert made["rollout-a-1-fast"].replicas == 1
    assert "rollout-a-1-spot" not in made


def test_sizes_overrule_the_job_and_the_options() -> None:
    sizes = {"rollout-a-1": 2, "rollout-a-1-spot": 0, "reward": 0, "environment": 5}
    made = plan([job()], POOLS, sizes)
    assert {name: each.replicas for name, each in made.items()} == {
        "environment": 5,
        "reward": 0,
        "trainer-a-1": 1,
        "rollout-a-1": 2,
    }


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
    units = replicas_of(made.values())
    count = {kind: sum(p.kind is kind for p in units) for kind in WorkerKind}
    served = [each for each in found if each.state in SERVED]
    assert count[WorkerKind.ENVIRONMENT] == environments
    assert count[WorkerKind.REWARD] == rewards
    assert count[WorkerKind.TRAINER] == len(served)
    assert count[WorkerKind.ROLLOUT] == sum(each.spec.rollout.replicas for each in served)
    assert {p.job_id for p in made.values()} - {""} == {each.job_id for each in served}
    assert plan(reversed(found), options) == made


def test_nothing_is_started_for_a_job_that_an_endpoint_answers() -> None:
    model = {"path": "small", "endpoint": {"name": "outside"}}
    made = plan([job(kind="eval", eval={"tasks": 3}, model=model)], ControllerOptions())
    assert list(made) == ["environment", "reward"]
