import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import JobSpec
from paceline.data import JobData
from paceline.enums import JOB_TRANSITIONS, JobState, TrackerState
from paceline.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    StateError,
    TransitionError,
    UnlistedError,
)
from paceline.platform import wire
from paceline.plugins.allowed import AllowedTargets
from paceline.types import JobStatus, TrackerStatus
from paceline.v1 import types_pb2
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.ledger.generation.plan import wanted_tasks
from paceline_experience.ledger.sources import check_plugins, task_sources
from paceline_experience.store.keys import all_keys
from paceline_experience.store.store import Store

PATH = (JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED)


def make_spec(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "name": "sums",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": [{"kind": "exact"}],
        **changes,
    }
    return JobSpec.model_validate(fields)


@pytest.fixture
def jobs(store: Store) -> JobStore:
    return JobStore(store)


async def test_a_job_is_read_as_it_was_made(jobs: JobStore) -> None:
    job = await jobs.create(JobParts(make_spec()), artifacts={"config.json": "ab"})
    again = await jobs.get(job.status.job_id)
    assert again.status.job_id.startswith("sums-")
    assert len(again.status.job_id) == len("sums-") + 6
    assert again.status.state is JobState.QUEUED
    assert (again.status.step, again.status.version) == (0, -1)
    assert again.artifacts == {"config.json": "ab"}
    assert JobSpec.model_validate_json(again.spec) == make_spec()


async def test_the_spec_of_a_job_of_0_1_0_is_in_its_record(jobs: JobStore, store: Store) -> None:
    made = await jobs.create(JobParts(make_spec()), artifacts={})
    record = f"{{default/{made.status.job_id}}}:"
    await store.command("DEL", f"{record}spec")
    await store.command("HSET", f"{record}record", "spec", made.spec)
    assert (await jobs.get(made.status.job_id)).spec == made.spec


async def test_a_job_that_is_deleted_while_it_is_read_is_unknown(store: Store) -> None:
    class DeletesFirst(Store):
        async def command(self, *args: str | int | float | bytes) -> Any:
            if args[0] == "GET":
                await super().command("UNLINK", *all_keys("default", job_id))
            return await super().command(*args)

    job_id = (await JobStore(store).create(JobParts(make_spec()), artifacts={})).status.job_id
    with pytest.raises(NotFoundError):
        await JobStore(DeletesFirst(store.redis)).get(job_id)


async def test_the_same_request_is_answered_with_the_same_job(jobs: JobStore) -> None:
    one, two = await asyncio.gather(
        jobs.create(JobParts(make_spec()), artifacts={}, request_id="r"),
        jobs.create(JobParts(make_spec()), artifacts={}, request_id="r"),
    )
    assert one.status.job_id == two.status.job_id
    found = await jobs.find("default", "r")
    assert found is not None
    assert found.status.job_id == one.status.job_id
    assert await jobs.find("default", "other") is None


async def test_requests_of_tenants_do_not_meet(jobs: JobStore) -> None:
    one = await jobs.create(JobParts(make_spec()), artifacts={}, request_id="r")
    two = await jobs.create(JobParts(make_spec(tenant="b")), artifacts={}, request_id="r")
    assert one.status.job_id != two.status.job_id


async def test_another_spec_under_the_same_request_is_refused(jobs: JobStore) -> None:
    job = await jobs.create(JobParts(make_spec()), artifacts={}, request_id="r")
    with pytest.raises(ConflictError, match=f"'r' has made job '{job.status.job_id}'"):
        await jobs.create(
            JobParts(make_spec(name="other", ttl_seconds_after_finished=0)),
            artifacts={},
            request_id="r",
        )
    await jobs.transition(job.status.job_id, JobState.FAILED)
    assert await jobs.registry.expired() == []


async def test_an_id_that_is_taken_is_not_given_again(store: Store) -> None:
    suffixes: Iterator[str] = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    jobs = JobStore(store, new_suffix=lambda: next(suffixes))
    made = [await jobs.create(JobParts(make_spec()), artifacts={}) for _ in range(2)]
    assert [job.status.job_id for job in made] == ["sums-aaaaaa", "sums-bbbbbb"]


async def test_pages_show_every_job_once_newest_first(jobs: JobStore) -> None:
    made = [await jobs.create(JobParts(make_spec()), artifacts={}) for _ in range(5)]
    seen: list[str] = []
    token = ""
    while True:
        page = await jobs.list_page(page_size=2, page_token=token)
        seen += [job.status.job_id for job in page.jobs]
        token = page.token
        if not token:
            break
    assert seen == [job.status.job_id for job in reversed(made)]


async def test_a_list_reads_no_record_of_another_tenant(jobs: JobStore, store: Store) -> None:
    for number in range(5):
        await jobs.create(JobParts(make_spec(tenant="b" if number == 2 else "a")), artifacts={})
    before = (await store.redis.info("commandstats"))["cmdstat_hgetall"]["calls"]
    page = await jobs.list_page(tenant="b")
    after = (await store.redis.info("commandstats"))["cmdstat_hgetall"]["calls"]
    assert [job.status.tenant for job in page.jobs] == ["b"]
    assert after - before == 1


async def test_a_page_ends_at_its_size(jobs: JobStore) -> None:
    for _ in range(3):
        await jobs.create(JobParts(make_spec()), artifacts={})
    page = await jobs.list_page(page_size=1)
    assert (len(page.jobs), bool(page.token)) == (1, True)


async def test_pages_are_filtered_by_state_and_tenant(jobs: JobStore) -> None:
    over = await jobs.create(JobParts(make_spec()), artifacts={})
    live = await jobs.create(JobParts(make_spec(tenant="b")), artifacts={})
    for state in PATH:
        await jobs.transition(over.status.job_id, state)
    ids = {
        "succeeded": (await jobs.list_page(states=[JobState.SUCCEEDED])).jobs,
        "queued": (await jobs.list_page(states=[JobState.QUEUED, JobState.RUNNING])).jobs,
        "b": (await jobs.list_page(tenant="b")).jobs,
        "live": await jobs.live(),
    }
    names = {key: [job.status.job_id for job in found] for key, found in ids.items()}
    alive = [live.status.job_id]
    assert names == {"succeeded": [over.status.job_id], "queued": alive, "b": alive, "live": alive}


async def test_a_page_token_of_others_is_refused(jobs: JobStore) -> None:
    with pytest.raises(InvalidError, match="page_token: 'x'"):
        await jobs.list_page(page_token="x")


@pytest.mark.parametrize("origin", list(JobState))
@pytest.mark.parametrize("to", list(JobState))
async def test_states_follow_the_table(jobs: JobStore, origin: JobState, to: JobState) -> None:
    job_id = (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id
    await jobs.note(job_id, state=origin)
    if origin is to or to in JOB_TRANSITIONS[origin]:
        assert (await jobs.transition(job_id, to, reason="why")).status.state is to
    else:
        with pytest.raises(TransitionError, match=f"job: {origin} -> {to} is not allowed"):
            await jobs.transition(job_id, to)


async def test_only_one_of_two_steps_at_once_wins(jobs: JobStore) -> None:
    job_id = (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id
    await jobs.transition(job_id, JobState.CANCELLING)
    ends = (JobState.CANCELLED, JobState.FAILED)
    results = await asyncio.gather(
        *(jobs.transition(job_id, end) for end in ends), return_exceptions=True
    )
    assert sum(isinstance(result, TransitionError) for result in results) == 1


async def test_seconds_run_while_the_job_runs(jobs: JobStore) -> None:
    job_id = (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id
    assert (await jobs.get(job_id)).status.runtime_s == 0.0
    for state in PATH:
        await jobs.transition(job_id, state)
    first = (await jobs.get(job_id)).status
    await asyncio.sleep(0.02)
    second = (await jobs.get(job_id)).status
    assert first.runtime_s == second.runtime_s > 0.0
    assert second.age_s > first.age_s


async def test_times_are_rfc_3339(jobs: JobStore) -> None:
    job_id = (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id
    fresh = (await jobs.get(job_id)).status
    assert (fresh.started_at, fresh.finished_at) == (None, None)
    for state in PATH:
        await jobs.transition(job_id, state)
    over = (await jobs.get(job_id)).status
    assert over.created_at == fresh.created_at
    times = [datetime.fromisoformat(each or "") for each in (over.created_at, over.started_at)]
    ended = datetime.fromisoformat(over.finished_at or "")
    assert times[0] <= times[1] <= ended
    assert abs((datetime.now(UTC) - ended).total_seconds()) < 600
    assert ended.tzinfo is UTC


async def test_cancelling_twice_is_one_cancellation(jobs: JobStore) -> None:
    job_id = (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id
    await jobs.cancel(job_id, reason="enough")
    job = await jobs.cancel(job_id)
    assert (job.status.state, job.status.reason) == (JobState.CANCELLING, "enough")


async def test_a_finished_job_cannot_be_cancelled(jobs: JobStore) -> None:
    job_id = (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id
    for state in PATH:
        await jobs.transition(job_id, state)
    with pytest.raises(StateError, match=f"job {job_id} has already succeeded"):
        await jobs.cancel(job_id)


async def test_unknown_ids_are_named(jobs: JobStore) -> None:
    for call in (jobs.get("x"), jobs.cancel("x"), jobs.transition("x", JobState.FAILED)):
        with pytest.raises(NotFoundError, match="job 'x' is not known"):
            await call


async def test_notes_show_in_the_status(jobs: JobStore) -> None:
    job_id = (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id
    await jobs.note(job_id, step=3, version=4, incarnation=2, eval_reward="0.5", eval_step=2)
    status = (await jobs.get(job_id)).status
    assert (status.step, status.version, status.incarnation) == (3, 4, 2)
    assert (status.eval_reward, status.eval_step) == (0.5, 2)
    assert await jobs.noted(job_id, "step", "nothing") == ["3", ""]


async def test_one_owner_at_a_time(jobs: JobStore) -> None:
    job = await jobs.create(JobParts(make_spec()), artifacts={})
    first = await jobs.claim(job, "a", lease_s=3600.0)
    assert first == await jobs.epoch(job) > 0
    assert await jobs.claim(job, "b", lease_s=3600.0) == 0
    assert await jobs.claim(job, "a", lease_s=0.05, epoch=first) == first
    while (second := await jobs.claim(job, "b", lease_s=3600.0)) == 0:
        await asyncio.sleep(0.01)
    assert second != first
    assert await jobs.claim(job, "a", lease_s=3600.0, epoch=first) == 0


def test_sources_of_a_job() -> None:
    sources = task_sources(
        wanted_tasks(make_spec(eval={"options": {"split": "heldout"}})), JobData()
    )
    assert len(sources.train) > 0
    assert sources.train[0].task_id != sources.evals[""][0].task_id
    assert not task_sources(wanted_tasks(make_spec(eval=None)), JobData()).evals
    evals = {"one": {"options": {"digits": 1}}, "two": {"options": {"split": "heldout"}}}
    assert {*task_sources(wanted_tasks(make_spec(evals=evals)), JobData()).evals} == {"one", "two"}


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ({"environment": "chess"}, "environments: 'chess' is not installed; installed: arithmetic"),
        ({"environment": "os:system"}, "'os:system' is not installed; .*may be named"),
        (
            {"environment": "arithmetic", "options": {"size": 0}},
            r"tasks: arithmetic with options \{'size': 0\} has no tasks",
        ),
        (
            {"environment": "arithmetic", "options": {"colour": 1}},
            "tasks.options: arithmetic refuses them: .*colour",
        ),
    ],
)
def test_bad_task_sources_are_named(tasks: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidError, match=says):
        task_sources(wanted_tasks(make_spec(tasks=tasks)), JobData())


@pytest.mark.parametrize(
    ("experience", "says"),
    [
        ({"sampler": "best"}, "sampler.kind: 'best' is not installed; installed: dart_order"),
        ({"filters": ["good"]}, "experience.filters.0.kind: 'good' is not installed"),
        ({"advantage": "gae"}, "advantage.kind: 'gae' is not installed; installed: d3s_episodes"),
    ],
)
def test_missing_plug_ins_are_named(experience: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidError, match=says):
        check_plugins(make_spec(experience=experience))


@given(st.text(alphabet="abc-0", min_size=1, max_size=8))
def test_names_have_no_dot_so_that_group_ids_can_be_split(name: str) -> None:
    from paceline_experience.dispatch.dispatch import job_id_of

    assert job_id_of(f"{name}-0a1b2c.e17.3") == f"{name}-0a1b2c"


async def test_the_key_of_the_weights_is_made_once_and_shown_in_no_job(store: Store) -> None:
    secrets = iter([b"a" * 32, b"b" * 32])
    jobs = JobStore(store, new_secret=lambda: next(secrets))
    job = await jobs.create(JobParts(make_spec()), artifacts={})
    job_id = job.status.job_id
    assert await jobs.weights_key(job_id) == b"a" * 32
    assert await jobs.weights_key(job_id) == b"a" * 32
    assert await JobStore(store).weights_key(job_id) == b"a" * 32
    assert (b"a" * 32).hex() not in repr(await jobs.get(job_id))


async def test_every_job_has_a_key_of_its_own(jobs: JobStore) -> None:
    made = [
        (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id for _ in range(2)
    ]
    keys = {await jobs.weights_key(job_id) for job_id in made}
    assert {len(key) for key in keys} == {32}
    assert len(keys) == 2


async def test_how_far_trackers_have_come_is_kept_with_the_job(jobs: JobStore) -> None:
    job_id = (await jobs.create(JobParts(make_spec()), artifacts={})).status.job_id
    wandb = TrackerStatus("wandb", "wandb", TrackerState.FOLLOWING, rows=7, url="https://w/1")
    await jobs.note_tracker(job_id, replace(wandb, rows=3))
    await jobs.note_tracker(job_id, wandb)
    await jobs.note_tracker(
        job_id, TrackerStatus("a", "mlflow", TrackerState.RETRYING, detail="hung: x")
    )
    found = (await jobs.get(job_id)).status.tracking
    assert [each.name for each in found] == ["a", "wandb"]
    assert found[1] == wandb
    assert (
        wire.from_proto(
            wire.to_proto((await jobs.get(job_id)).status, types_pb2.JobStatus), JobStatus
        ).tracking
        == found
    )


NAMING = {"reward": [{"kind": "python", "function": "a:b"}, "exact"]}


async def test_a_job_that_names_what_is_not_listed_is_not_made(store: Store) -> None:
    spec = make_spec(**NAMING)
    with pytest.raises(UnlistedError, match=r"reward\.0\.function: 'a:b' is not a function"):
        await JobStore(store).create(JobParts(spec), artifacts={}, request_id="r")
    assert await JobStore(store).live() == []
    listing = JobStore(store, allowed=AllowedTargets.of(["a:b"]))
    made = await listing.create(JobParts(spec), artifacts={}, request_id="r")
    # Nor does it keep what the operator lists no more.
    assert (await JobStore(store).get(made.status.job_id)).status.unlisted == ()


async def test_a_job_that_is_older_than_the_list_runs_to_its_end(store: Store) -> None:
    listing, jobs = JobStore(store, allowed=AllowedTargets.of(["a:b"])), JobStore(store)
    job_id = (await listing.create(JobParts(make_spec(**NAMING)), artifacts={})).status.job_id
    plain = (await listing.create(JobParts(make_spec()), artifacts={})).status.job_id
    for name in (job_id, plain):  # as they were written before
        await store.command("HDEL", f"{{default/{name}}}:record", "targets")
    assert (await jobs.get(job_id)).status.unlisted == ("a:b",)
    assert (await jobs.get(plain)).status.unlisted == ()
    assert (await listing.get(job_id)).status.unlisted == ()  # listed meanwhile
    for state in PATH:
        found = await jobs.transition(job_id, state)
        assert found.status.unlisted == (() if state.terminal else ("a:b",))
    with pytest.raises(UnlistedError):
        await jobs.create(JobParts(make_spec(**NAMING)), artifacts={})
