"""A complete small job, driven through the stubs of a real server on a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.enums import JobState, Purpose
from paceline.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    PacelineError,
    StateError,
    StoreError,
    TransitionError,
)
from paceline.platform import wire
from paceline.platform.transport.rpc import stream
from paceline.v1 import experience_pb2 as ex
from paceline.v1 import jobs_pb2, options_pb2, roster_pb2, types_pb2
from paceline_experience.store.keys import all_keys
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client
    from paceline_harness.experience_service.serving import Lives

SOURCE = "http://trainer"
LIMIT_S = PATIENCE_S


def files_of(run_dir: Path, job_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = run_dir / "jobs" / job_id
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((folder / "summary.json").read_text())
    return summary, [json.loads(line) for line in lines]


async def test_a_whole_job(client: Client, tmp_path: Path) -> None:
    job_id = (await client.submit()).status.job_id
    watcher = asyncio.create_task(client.watch(job_id))
    await client.set_state(job_id, JobState.STARTING)
    trainer = client.trainer(job_id)
    assert await trainer.begin(0) == -1
    async with client.environment():
        assert await trainer.publish_version(0) == 0
        assert (await client.get(job_id)).status.state == types_pb2.JOB_STATE_RUNNING
        assert [await trainer.train(step) for step in range(4)] == ["", "", "", "finished"]
        assert (await trainer.take(4))[0].stop == types_pb2.STOP_REASON_FINISHED
        await trainer.commit_checkpoint(4)
        events = await asyncio.wait_for(watcher, LIMIT_S)
    status = (await client.get(job_id)).status
    assert (status.state, status.step, status.version) == (types_pb2.JOB_STATE_SUCCEEDED, 4, 4)
    assert (status.eval_reward, status.eval_step) == (1.0, 4)
    counts = (await client.verify(job_id)).counts
    assert counts["trained"] + counts["durable"] == 16
    told = [row for event in events for row in event.metrics]
    summary, rows = files_of(tmp_path, job_id)
    assert [(r.index, r.step, r.kind) for r in told] == [
        (r["index"], r["step"], wire.number_of(Purpose(r["kind"]))) for r in rows
    ]
    assert [r["step"] for r in rows if r["kind"] == "train"] == [1, 2, 3, 4]
    assert events[-1].status.state == types_pb2.JOB_STATE_SUCCEEDED
    assert summary == wire.from_struct(status.summary)
    assert (summary["episodes_trained"], summary["ledger_consistent"]) == (16, True)
    assert (summary["eval_reward_start"], summary["eval_reward_end"]) == (1.0, 1.0)


async def test_a_digest_announced_after_the_end_does_not_revive_a_job(client: Client) -> None:
    job_id = (await client.submit(eval=None, stop={"steps": 1})).status.job_id
    worker = types_pb2.Worker(
        worker_id="r1",
        kind=options_pb2.WORKER_KIND_ROLLOUT,
        job_id=job_id,
        weights_endpoint="http://r1",
    )
    rollout = await client.rollout(job_id, "r1")
    await call(rollout.roster.Join, roster_pb2.JoinRequest(worker=worker))
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    weights = roster_pb2.ListWeightsRequest(job_id=job_id)
    async with client.environment():
        await trainer.publish_version(0)
        assert (await call(client.jobs.ListWeights, weights)).holders
        await trainer.train(0)
        await trainer.take(1)
        await asyncio.wait_for(client.watch(job_id), LIMIT_S)
    assert (await trainer.seed(1, digest="d")).version.digest == "d"
    assert not (await call(client.jobs.ListWeights, weights)).holders


async def test_what_is_left_of_a_job_can_be_read(client: Client, tmp_path: Path) -> None:
    job_id = (await client.submit(eval=None, stop={"steps": 1})).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    async with client.environment():
        await trainer.publish_version(0)
        await trainer.train(0)
        await trainer.take(1)
        await asyncio.wait_for(client.watch(job_id), LIMIT_S)
    listed = jobs_pb2.ListTrajectoriesRequest(job_id=job_id, page_size=3)
    first = await call(client.jobs.ListTrajectories, listed)
    listed.page_token = first.next_page_token
    second = await call(client.jobs.ListTrajectories, listed)
    found = [(t.group_id, t.index) for t in [*first.trajectories, *second.trajectories]]
    assert len(first.trajectories) == 3
    assert len(set(found)) == 4
    page = await call(client.jobs.ListMetrics, jobs_pb2.ListMetricsRequest(job_id=job_id))
    assert (len(page.rows), page.next) == (1, 0)
    assert page.rows[0].values["loss"] == 1.0
    path = tmp_path / "jobs" / job_id / "trajectories" / "final.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(t["group_id"], t["index"]) for t in kept} == set(found)
    assert kept[0]["transcripts"][0]["tokens"] == [1, 2, 3]


async def test_a_job_that_is_deleted_during_its_verification_is_not_found(
    client: Client, store_url: str
) -> None:
    job = (await client.submit(eval=None, stop={"steps": 1})).status
    trainer = client.trainer(job.job_id)
    await trainer.begin(0)
    async with client.environment():
        await trainer.publish_version(0)
        await trainer.train(0)
        await trainer.take(1)
        await asyncio.wait_for(client.watch(job.job_id), LIMIT_S)
    await client.verify(job.job_id)
    store = await Store.connect(store_url, wait_s=LIMIT_S)
    await store.command("UNLINK", *all_keys(job.tenant, job.job_id))
    await store.close()
    with pytest.raises(NotFoundError, match=job.job_id):
        await client.verify(job.job_id)


async def test_a_job_survives_the_service_and_its_trainer(
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path) as client:
        experience = {"batch_groups": 2, "group_size": 2, "lease_s": 1.0}
        job_id = (await client.submit(experience=experience)).status.job_id
        trainer = client.trainer(job_id)
        await trainer.begin(0)
        async with client.environment():
            await trainer.publish_version(0)
            await trainer.train(0)
            await trainer.commit_checkpoint(1)
            await trainer.train(1)
            batch = await trainer.take(2)
    async with lives(store_url, tmp_path) as client:
        status = (await client.get(job_id)).status
        assert (status.state, status.step, status.version) == (types_pb2.JOB_STATE_RUNNING, 2, 2)
        await client.verify(job_id)
        old, trainer = client.trainer(job_id), client.trainer(job_id)
        await old.be(1)
        assert await trainer.begin(1) == 2
        with pytest.raises(FencedError):
            await old.take(1)
        async with client.environment():
            assert await trainer.publish_version(1) == 3
            await trainer.train(1)
            assert (await trainer.take(2))[0].batch_id == batch[0].batch_id
            assert [await trainer.train(step) for step in (2, 3)] == ["", "finished"]
            await trainer.take(4)
            await asyncio.wait_for(client.watch(job_id), LIMIT_S)
        await client.verify(job_id)
        summary, _ = files_of(tmp_path, job_id)
        assert (summary["steps"], summary["episodes_trained"]) == (4, 16)
        assert summary["ledger_consistent"]


async def test_routes_and_members(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    rollouts: dict[str, Client] = {}
    for name in ("r1", "r2"):
        worker = types_pb2.Worker(
            worker_id=name,
            kind=options_pb2.WORKER_KIND_ROLLOUT,
            job_id=job_id,
            weights_endpoint=f"http://{name}",
        )
        rollouts[name] = await client.rollout(job_id, name)
        reply = await call(rollouts[name].roster.Join, roster_pb2.JoinRequest(worker=worker))
        assert reply.lease_s == LIMIT_S
    first, second = (rollouts[name].roster for name in ("r1", "r2"))
    watch = roster_pb2.WatchRouteRequest(job_id=job_id, worker_id="r2")
    routes = stream(second.WatchRoute, watch, timeout_s=LIMIT_S)
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    await trainer.publish_version(0)
    route = await anext(routes)
    assert (route.version.version, route.sources[0].endpoint) == (0, "http://r1")
    assert list(route.fallbacks) == [SOURCE]
    await call(first.Leave, roster_pb2.LeaveRequest(worker_id="r1"))
    assert (await anext(routes)).sources[0].endpoint == SOURCE
    await call(second.Heartbeat, roster_pb2.HeartbeatRequest(worker_id="r2"))
    with pytest.raises(NotFoundError, match="join again"):
        await call(first.Heartbeat, roster_pb2.HeartbeatRequest(worker_id="r1"))
    request = roster_pb2.ListWorkersRequest(job_id=job_id)
    members = (await call(client.roster.ListWorkers, request)).workers
    assert {(w.worker_id, w.kind) for w in members} == {
        ("r2", options_pb2.WORKER_KIND_ROLLOUT),
        ("experience-0", options_pb2.WORKER_KIND_EXPERIENCE),
    }


async def test_an_eval_holds_a_rollout_worker_at_its_version(client: Client) -> None:
    job_id = (await client.submit(eval={"every": 1, "tasks": 1})).status.job_id
    worker = types_pb2.Worker(
        worker_id="r1",
        kind=options_pb2.WORKER_KIND_ROLLOUT,
        job_id=job_id,
        weights_endpoint="http://r1",
    )
    rollout = await client.rollout(job_id, "r1")
    await call(rollout.roster.Join, roster_pb2.JoinRequest(worker=worker))
    watch = roster_pb2.WatchRouteRequest(job_id=job_id, worker_id="r1")
    routes = stream(rollout.roster.WatchRoute, watch, timeout_s=LIMIT_S)
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    await trainer.publish_version(0)
    assert (await anext(routes)).version.version == 0
    await trainer.begin(0)
    assert await trainer.publish_version(0) == 1
    following = asyncio.ensure_future(anext(routes))
    await asyncio.sleep(0.3)
    assert not following.done()
    async with client.environment():
        assert (await asyncio.wait_for(following, LIMIT_S)).version.version == 1


async def test_cancelling(client: Client, tmp_path: Path) -> None:
    job_id = (await client.submit()).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    await trainer.publish_version(0)
    waiting = asyncio.create_task(trainer.take(0))
    request = jobs_pb2.CancelJobRequest(job_id=job_id, reason="enough")
    assert (
        await call(client.jobs.CancelJob, request)
    ).status.state == types_pb2.JOB_STATE_CANCELLING
    assert (await waiting)[0].stop == types_pb2.STOP_REASON_CANCELLED
    with pytest.raises(StateError, match="is cancelling: no trainer may start"):
        await trainer.begin(0)
    assert (
        await client.set_state(job_id, JobState.CANCELLED)
    ).status.state == types_pb2.JOB_STATE_CANCELLED
    with pytest.raises(StateError, match=f"job {job_id} is already cancelled"):
        await call(client.jobs.CancelJob, request)
    with pytest.raises(TransitionError, match="cancelled -> running is not allowed"):
        await client.set_state(job_id, JobState.RUNNING)
    summary, _ = files_of(tmp_path, job_id)
    assert (summary["state"], summary["ledger_consistent"]) == ("cancelled", True)


async def test_two_jobs_share_a_worker_fairly(client: Client) -> None:
    ids = [(await client.submit(eval=None)).status.job_id for _ in range(2)]
    for job_id in ids:
        trainer = client.trainer(job_id)
        await trainer.begin(0)
        await trainer.publish_version(0)

    async def requests() -> AsyncIterator[ex.LeaseRequest]:
        yield ex.LeaseRequest(worker_id="e", credits=8)
        await asyncio.sleep(LIMIT_S)

    reply = await anext(client.lease(requests()))
    counts = dict.fromkeys(ids, 0)
    for given in reply.assignments:
        counts[given.job_id] += len(given.indices)
    assert counts == dict.fromkeys(ids, 4)
    demand = await call(client.experience.Demand, ex.DemandRequest())
    waits = {job.job_id: (job.leased, job.headroom_groups) for job in demand.jobs}
    assert {waits[job_id] for job_id in ids} == {(4, 8)}
    done = {(job.step, job.accepted_groups, job.sampled_tokens) for job in demand.jobs}
    assert done == {(0, 0, 0)}


async def test_leases_are_renewed_given_back_and_aborted(client: Client) -> None:
    job_id = (await client.submit(eval=None)).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    await trainer.publish_version(0)
    told: asyncio.Queue[ex.LeaseRequest | None] = asyncio.Queue()

    async def requests() -> AsyncIterator[ex.LeaseRequest]:
        while (message := await told.get()) is not None:
            yield message

    told.put_nowait(ex.LeaseRequest(worker_id="e", credits=2))
    replies = client.lease(requests())
    (given,) = (await anext(replies)).assignments
    key = ex.EpisodeKey(job_id=job_id, group_id=given.group_id, index=0, attempt=1)
    lost = ex.EpisodeKey(job_id=job_id, group_id="nothing", index=0, attempt=1)
    foreign = ex.EpisodeKey(job_id="gone", group_id="gone.0", index=0, attempt=1)
    told.put_nowait(ex.LeaseRequest(renew=[key, lost, foreign]))
    aborted = list((await anext(replies)).abort)
    if len(aborted) < 2:
        aborted += (await anext(replies)).abort
    assert {k.group_id for k in aborted} == {"nothing", "gone.0"}
    told.put_nowait(ex.LeaseRequest(credits=1, give_back=[key]))
    (again,) = (await anext(replies)).assignments
    assert (again.group_id, list(again.indices), list(again.attempts)) == (given.group_id, [0], [2])
    told.put_nowait(None)
    assert [reply async for reply in replies] == []


async def test_the_same_request_makes_one_job(client: Client) -> None:
    first = await client.submit("r")
    assert (await client.submit("r")).status.job_id == first.status.job_id
    with pytest.raises(ConflictError, match="request_id 'r' has made job"):
        await client.submit("r", stop={"steps": 9})
    request = ex.GetArtifactRequest(digest=first.artifacts["config.json"])
    chunks = stream(client.experience.GetArtifact, request, timeout_s=LIMIT_S)
    assert b"".join([chunk.data async for chunk in chunks]) == b"{}"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"colour": 1}, ConfigError, "colour: unknown field"),
        (
            {"tasks": {"environment": "arithmetic", "options": {"size": 0}}},
            InvalidError,
            "has no tasks",
        ),
        ({"tasks": {"environment": "chess"}}, InvalidError, "tasks.environment: 'chess' is not "),
        ({"experience": {"sampler": "best"}}, InvalidError, "sampler.kind: 'best' is not inst"),
    ],
)
async def test_bad_jobs_are_refused(
    client: Client, changes: dict[str, Any], error: type[PacelineError], says: str
) -> None:
    with pytest.raises(error, match=says):
        await client.submit(**changes)


async def test_unknown_jobs_are_named(client: Client) -> None:
    with pytest.raises(NotFoundError, match="job 'x' is not known"):
        await client.get("x")
    with pytest.raises(NotFoundError, match="job 'x' is not known"):
        await client.watch("x")
    with pytest.raises(NotFoundError, match="job 'x' is not known"):
        await client.trainer("x").begin(0)
    request = ex.GetArtifactRequest(digest="beef")
    chunks = stream(client.experience.GetArtifact, request, timeout_s=LIMIT_S)
    with pytest.raises(NotFoundError, match="artifact 'beef' is not known"):
        await anext(chunks)


async def test_an_unreachable_store_is_named(lives: Lives, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="store_url unix:///nowhere/s"):
        async with lives("unix:///nowhere/s", tmp_path, store_wait_s=0.2):
            pass
