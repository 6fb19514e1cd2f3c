"""Calls about weights by trainers and rollout workers, to a real service on a real store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.enums import JobState
from paceline.errors import FencedError, InvalidError, NotFoundError, StateError, UnavailableError
from paceline.platform.transport.rpc import stream
from paceline.v1 import jobs_pb2, options_pb2, roster_pb2, types_pb2
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client
    from paceline_harness.experience_service.serving import Lives

FIRST, SECOND = "http://node0", "http://node1"
LIMIT_S = PATIENCE_S


async def join(client: Client, job_id: str, name: str) -> None:
    worker = types_pb2.Worker(
        worker_id=name,
        kind=options_pb2.WORKER_KIND_ROLLOUT,
        job_id=job_id,
        active_version=-1,
        weights_endpoint=f"http://{name}",
    )
    rollout = await client.rollout(job_id, name)
    await call(rollout.roster.Join, roster_pb2.JoinRequest(worker=worker))


async def route_of(client: Client, job_id: str, name: str) -> roster_pb2.Route:
    request = roster_pb2.WatchRouteRequest(job_id=job_id, worker_id=name)
    rollout = await client.rollout(job_id, name)
    routes = stream(rollout.roster.WatchRoute, request, timeout_s=LIMIT_S)
    return await anext(routes)


async def test_every_seed_gets_the_same_answer(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    with pytest.raises(UnavailableError, match="part 1 waits for part 0"):
        await trainer.seed(0, at=SECOND, part=1, parts=2)
    first = await trainer.seed(0, at=FIRST, part=0, parts=2)
    second = await trainer.seed(0, at=SECOND, part=1, parts=2)
    assert first == second
    assert (first.source_endpoint, len(first.key)) == (FIRST, 32)
    assert first.chunk_bytes >= 256 << 10
    assert await trainer.seed(0, at=FIRST, part=0, parts=2) == first
    await join(client, job_id, "r1")
    route = await route_of(client, job_id, "r1")
    assert (route.version.version, route.key) == (0, first.key)


async def test_a_seed_that_comes_late_is_refused(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    async with client.environment():
        await trainer.seed(0, at=FIRST, part=0, parts=2)
        batch = await trainer.take(0)
        await trainer.commit(0, batch[0].batch_id)
        await trainer.seed(1, at=FIRST, part=0, parts=2)
        with pytest.raises(StateError, match="step 0 was to be seeded, but 1 is published"):
            await trainer.seed(0, at=SECOND, part=1, parts=2)
    with pytest.raises(InvalidError, match="part: 2 of 2"):
        await trainer.seed(1, at=SECOND, part=2, parts=2)
    await client.trainer(job_id).begin(0)
    with pytest.raises(FencedError):
        await trainer.seed(1, at=SECOND, part=1, parts=2)


async def test_a_restarted_service_gives_the_same_answers(
    store_url: str, lives: Lives, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path) as client:
        job_id = (await client.submit()).status.job_id
        trainer = client.trainer(job_id)
        await trainer.begin(0)
        before = await trainer.seed(0, at=FIRST, part=0, parts=2)
    async with lives(store_url, tmp_path) as client:
        again = client.trainer(job_id)
        await again.be(trainer.incarnation)
        assert await again.seed(0, at=SECOND, part=1, parts=2) == before
        await join(client, job_id, "r1")
        route = await route_of(client, job_id, "r1")
        assert (route.version.version, route.key) == (0, before.key)


async def test_weight_holders_are_shown_without_the_key(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    made = await trainer.seed(0, at=FIRST)
    await join(client, job_id, "r1")
    progress = roster_pb2.TransferProgress(version=0, num_ready=3, num_chunks=4, sources=[FIRST])
    beat = roster_pb2.HeartbeatRequest(worker_id="r1", active_version=-1, transfers=[progress])
    rollout = await client.rollout(job_id, "r1")
    await call(rollout.roster.Heartbeat, beat)
    request = roster_pb2.ListWeightsRequest(job_id=job_id)
    reply = await call(client.jobs.ListWeights, request)
    assert [v.version.version for v in reply.versions] == [0]
    assert reply.versions[0].chunk_bytes == made.chunk_bytes
    seed, worker = reply.holders
    assert (seed.worker_id, seed.kind, seed.endpoint) == (
        "",
        options_pb2.WORKER_KIND_TRAINER,
        FIRST,
    )
    assert (worker.worker_id, worker.endpoint) == ("r1", "http://r1")
    assert list(worker.transfers) == [progress]
    assert [source.endpoint for source in worker.sources] == [FIRST]
    assert made.key not in reply.SerializeToString()
    job = await call(client.jobs.GetJob, jobs_pb2.GetJobRequest(job_id=job_id))
    assert made.key.hex() not in str(job)
    with pytest.raises(NotFoundError):
        await call(client.jobs.ListWeights, roster_pb2.ListWeightsRequest(job_id="none"))


async def beat(
    client: Client, job_id: str, name: str, *, active: int = -1, refuses: int | None = None
) -> roster_pb2.HeartbeatReply:
    request = roster_pb2.HeartbeatRequest(worker_id=name, active_version=active)
    if refuses is not None:
        reason = "canary: trim 0.31, noise 0.04, ratio 7.8, allowed 2"
        request.refusal.CopyFrom(roster_pb2.WeightRefusal(version=refuses, reason=reason))
    rollout = await client.rollout(job_id, name)
    return await call(rollout.roster.Heartbeat, request)


async def test_a_worker_that_refuses_what_another_one_serves_is_at_fault(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    await trainer.seed(0)
    for name in ("r1", "r2"):
        await join(client, job_id, name)
    assert not (await beat(client, job_id, "r1", refuses=0)).at_fault
    await beat(client, job_id, "r2", active=0)
    async with asyncio.timeout(LIMIT_S):
        while not (await beat(client, job_id, "r1", refuses=0)).at_fault:
            await asyncio.sleep(0.05)
    assert not (await beat(client, job_id, "r2", active=0)).at_fault
    request = roster_pb2.ListWeightsRequest(job_id=job_id)
    holders = (await call(client.jobs.ListWeights, request)).holders
    assert {each.worker_id: each.trouble for each in holders}["r1"].startswith("refuses version 0")


async def test_what_all_workers_refuse_is_published_again(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    await trainer.seed(0)
    waits = asyncio.create_task(trainer.take(0))
    for name in ("r1", "r2"):
        await join(client, job_id, name)
        await beat(client, job_id, name, refuses=0)
    async with asyncio.timeout(LIMIT_S):
        (answer,) = await waits
    assert answer.publish_again
    assert (await trainer.seed(0, parent=0)).version.version == 1
    waits = asyncio.create_task(trainer.take(0))
    assert (await route_of(client, job_id, "r1")).version.version == 1
    for name in ("r1", "r2"):
        await beat(client, job_id, name, active=1)
    async with client.environment(), asyncio.timeout(LIMIT_S):
        (answer, *_) = await waits
    assert (answer.step, answer.publish_again, answer.stop) == (0, False, 0)
    assert answer.num_samples


async def test_a_report_must_name_an_event(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    report = roster_pb2.ReportTransferRequest(
        job_id=job_id,
        worker_id="r1",
        version=0,
        endpoint=FIRST,
        event=roster_pb2.TRANSFER_EVENT_STALLED,
    )
    rollout = await client.rollout(job_id, "r1")
    await call(rollout.roster.ReportTransfer, report)
    report.event = 99  # type: ignore[assignment]
    with pytest.raises(InvalidError, match="event: 99 is not known; allowed: done, "):
        await call(rollout.roster.ReportTransfer, report)


async def test_the_digest_of_a_version_is_recorded(
    store_url: str, lives: Lives, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path) as client:
        job_id = (await client.submit()).status.job_id
        trainer = client.trainer(job_id)
        await trainer.begin(0)
        first = await trainer.seed(0, at=FIRST)
        assert first.version.digest == ""
        again = await trainer.seed(0, at=FIRST, digest="ab")
        assert (again.version.version, again.version.digest) == (0, "ab")
        assert again.chunk_bytes == first.chunk_bytes
        assert (await trainer.seed(0, at=FIRST, digest="cd")).version.digest == "ab"
        assert (await trainer.seed(0, at=SECOND, part=1, parts=2)).version.digest == "ab"
    async with lives(store_url, tmp_path) as client:
        request = roster_pb2.ListWeightsRequest(job_id=job_id)
        (version,) = (await call(client.jobs.ListWeights, request)).versions
        assert version.version.digest == "ab"
        await client.trainer(job_id).begin(0)  # an incarnation that announces nothing
        for state in (JobState.CANCELLING, JobState.CANCELLED):
            await client.set_state(job_id, state)
    versions = json.loads((tmp_path / "jobs" / job_id / "versions.json").read_text())
    assert [(each["version"], each["step"], each["digest"]) for each in versions] == [(0, 0, "ab")]
