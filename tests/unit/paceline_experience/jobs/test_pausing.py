"""A job that is paused and resumed trains what it would have trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.enums import JobState, TokenSource
from paceline.errors import StateError, TransitionError
from paceline.types import EpisodeProgress, TokenSpan, Transcript
from paceline.v1.experience_pb2 import TrainSample
from paceline_experience.store.store import Store

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site, Sites

EVAL: dict[str, Any] = {"every": 2, "tasks": 2, "options": {"split": "heldout"}}


@pytest.fixture
async def site(store: Store, tmp_path: Path, sites: Sites) -> Site:
    found = sites(store, tmp_path)
    await found.submit(stop={"steps": 6, "wall_s": 1000})
    await found.begin(0)
    return found


async def paused(site: Site) -> None:
    """Pause it as the controller does once no worker is left."""
    await site.pausing.pause(site.job_id, reason="lunch")
    await site.job_service.set_state(site.job_id, JobState.PAUSED, reason="lunch")


async def resumed(site: Site, step: int) -> None:
    await site.pausing.resume(site.job_id, reason="")
    await site.job_service.set_state(site.job_id, JobState.STARTING, reason="")
    await site.begin(step)


async def groups_of(site: Site, steps: int) -> list[list[str]]:
    """Train some steps; the groups of each batch."""
    found: list[list[str]] = []
    for _ in range(steps):
        step = await site.step()
        await site.play(evals=0)
        share = await site.take(step)
        samples = [TrainSample.FromString(data) for data in share.samples]
        found.append(sorted({each.group_id.partition(".")[2] for each in samples}))
        await site.commit(step, share.batch_id)
        await site.announce(step + 1)
    return found


async def test_a_controller_that_has_missed_the_resumption_does_not_pause_it_again(
    site: Site,
) -> None:
    await paused(site)
    await site.pausing.resume(site.job_id, reason="")
    with pytest.raises(TransitionError):
        await site.job_service.set_state(site.job_id, JobState.PAUSED, reason="lunch")
    assert (await site.jobs.get(site.job_id)).status.state is JobState.QUEUED


async def test_a_controller_that_says_why_a_job_waits_does_not_resume_it(
    store: Store, tmp_path: Path, sites: Sites
) -> None:
    site = sites(store, tmp_path)
    await site.submit(stop={"steps": 6})
    await site.job_service.set_state(site.job_id, JobState.QUEUED, reason="no GPU is free")
    await site.pausing.pause(site.job_id, reason="lunch")
    with pytest.raises(TransitionError):
        await site.job_service.set_state(site.job_id, JobState.QUEUED, reason="1 GPU is free")
    status = (await site.jobs.get(site.job_id)).status
    assert (status.state, status.reason) == (JobState.PAUSED, "lunch")


async def test_a_job_that_is_resumed_while_it_is_said_to_be_paused_stays_resumed(
    site: Site, store: Store
) -> None:
    for requests in range(16):  # of the controller's call to the store, before it is resumed
        await paused(site)
        call = site.job_service.set_state(site.job_id, JobState.PAUSED, reason="lunch")
        said = asyncio.create_task(call)
        for _ in range(requests):
            await store.command("PING")
        await site.pausing.resume(site.job_id, reason="")
        await asyncio.gather(said, return_exceptions=True)
        assert (await site.jobs.get(site.job_id)).status.state is JobState.QUEUED


async def test_pausing_ends_the_trainer_and_resuming_trains_the_same_batches(
    store: Store, tmp_path: Path, sites: Sites
) -> None:
    ran: list[list[list[str]]] = []
    for breaks in (False, True):
        site = sites(store, tmp_path / str(breaks))
        await site.submit(stop={"steps": 6})
        await site.begin(0)
        found = await groups_of(site, 2)
        if breaks:
            await site.pausing.pause(site.job_id, reason="")
            assert (await site.take(2)).stop == "paused"
            await site.checkpoint(2)
            await site.job_service.set_state(site.job_id, JobState.PAUSED, reason="")
            await site.die()
            await resumed(site, 2)
        found += await groups_of(site, 4)
        ran.append(found)
        await site.ledgers.close()
    assert ran[0] == ran[1]


async def test_episodes_in_flight_go_back_with_their_progress(site: Site) -> None:
    ledger = await site.ledger()
    (first, *_) = await ledger.leases.lease(worker_id="w", train=100, evals=0)
    key = (first.group_id, first.indices[0], first.attempts[0])
    prompt = Transcript(
        tokens=(1, 2), spans=(TokenSpan(0, 2, TokenSource.TEMPLATE),), logprobs=(), versions=()
    )
    await ledger.renew(worker_id="w", keys=(), progress=[EpisodeProgress(*key, (prompt,))])
    before = await ledger.verify()
    await site.pausing.pause(site.job_id, reason="")
    recalled = ledger.recalled("w")
    assert len(recalled) == before.counts["leased"]
    assert {each.reason for each in recalled} == {"drain"}
    await ledger.give_back(worker_id="w", keys=recalled[1:])  # one of them hangs
    await site.job_service.set_state(site.job_id, JobState.PAUSED, reason="")
    report = await ledger.verify()
    assert report.ok, report.problems
    assert (report.counts["leased"], report.counts["queued"]) == (0, before.counts["leased"])
    await resumed(site, 0)
    again = await ledger.leases.lease(worker_id="w", train=100, evals=0)
    found = {(a.group_id, p.index): p for a in again for p in a.progress}
    assert found[key[:2]].transcripts == (prompt,)


async def test_no_time_passes_of_a_paused_job(site: Site) -> None:
    await paused(site)
    site.clock.advance(5000)
    await site.sweep()
    await resumed(site, 0)
    assert (await site.status()).state is JobState.RUNNING
    await site.sweep()
    assert not (await site.ledger()).stopping
    site.clock.advance(1001)
    await site.sweep()
    assert (await site.ledger()).stopping


async def test_nothing_is_leased_before_a_resumed_job_has_weights(site: Site) -> None:
    await paused(site)
    await site.pausing.resume(site.job_id, reason="")
    await site.job_service.set_state(site.job_id, JobState.STARTING, reason="")
    site.incarnation = await site.training.grant_incarnation(site.job_id)
    ledger = await site.ledger()
    assert not ledger.stopping
    assert await ledger.leases.lease(worker_id="w", train=9, evals=9) == []
    await site.announce(0)
    assert await ledger.leases.lease(worker_id="w", train=9, evals=0)


async def test_an_eval_that_a_pause_interrupts_begins_again(
    store: Store, tmp_path: Path, sites: Sites
) -> None:
    site = sites(store, tmp_path)
    await site.submit(eval=EVAL)
    await site.begin(0)
    ledger = await site.ledger()
    (first, *_) = await ledger.leases.lease(worker_id="w", train=0, evals=1)
    assert first.pinned_version == 0
    await paused(site)
    await resumed(site, 0)
    await site.play()
    await site.sweep()
    (row,) = [each for each in await site.rows() if each.kind == "eval"]
    assert (row.step, row.values["version"], row.values["complete"]) == (0, 1, True)


async def test_a_job_without_workers_is_paused_at_once(
    store: Store, tmp_path: Path, sites: Sites
) -> None:
    site = sites(store, tmp_path)
    await site.submit()
    job = await site.pausing.pause(site.job_id, reason="later")
    assert (job.status.state, job.status.reason) == (JobState.PAUSED, "later")
    with pytest.raises(StateError, match="paused: no trainer may start"):
        await site.training.grant_incarnation(site.job_id)
    await resumed(site, 0)
    await site.play()
    assert (await site.status()).state is JobState.RUNNING


async def test_what_cannot_be_paused_says_why(site: Site) -> None:
    pausing = site.pausing
    await pausing.pause(site.job_id, reason="")
    with pytest.raises(StateError, match="is still pausing"):
        await pausing.resume(site.job_id, reason="")
    await site.job_service.cancel(site.job_id, reason="")
    for call in (pausing.pause, pausing.resume):
        with pytest.raises(StateError, match="is cancelling"):
            await call(site.job_id, reason="")


async def test_paused_time_is_not_part_of_a_jobs_age(store: Store, site: Site) -> None:
    await paused(site)
    key = f"{{default/{site.job_id}}}:record"
    await store.command("HINCRBYFLOAT", key, "created", -1000)
    await store.command("HINCRBYFLOAT", key, "running", -900)
    await store.command("HINCRBYFLOAT", key, "paused", -800)
    for begin in (False, True):
        if begin:
            await resumed(site, 0)
        status = await site.status()
        assert status.age_s == pytest.approx(200, abs=10)
        assert status.runtime_s == pytest.approx(100, abs=10)
