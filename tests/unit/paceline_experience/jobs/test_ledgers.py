"""Which ledgers are open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from paceline.config import JobSpec
from paceline.data import JobData
from paceline.enums import JobState
from paceline.errors import StoreError
from paceline.types import Job
from paceline_experience.jobs.dry_run import DryRun, UntriedError
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.store.keys import job_key
from paceline_experience.store.store import Store, client_of
from paceline_harness.wires import Wire

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site, Sites

T = TypeVar("T")


class Interrupted(JobStore):
    """One of the calls by name fails, or is followed by something else before it returns; once."""

    fails = ""
    followed = ""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.by: Callable[[], Awaitable[object]] = never

    async def live(self) -> list[Job]:
        return await self._interrupted("live", super().live)

    async def get(self, job_id: str) -> Job:
        return await self._interrupted("get", partial(super().get, job_id))

    async def claim(self, job: Job, owner: str, *, lease_s: float, epoch: int = 0) -> int:
        claim = partial(super().claim, job, owner, lease_s=lease_s, epoch=epoch)
        return await self._interrupted("claim", claim)

    async def _interrupted(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if name == self.fails:
            self.fails = ""
            raise StoreError("away")
        answer = await call()
        if name == self.followed:
            self.followed = ""
            await self.by()
        return answer


async def never() -> None:
    raise AssertionError


class Trial(DryRun):
    """The first and every third one after it succeed."""

    def __init__(self) -> None:
        super().__init__(timeout_s=60, memory_bytes=1 << 30)
        self._number = 0

    async def check(self, spec: JobSpec, data: JobData) -> None:
        self._number += 1
        if self._number % 3 != 1:
            raise UntriedError(f"{spec.name}: no process")


@pytest.fixture
async def site(sites: Sites, store: Store, tmp_path: Path) -> AsyncIterator[Site]:
    built = sites(store, tmp_path, job_store=Interrupted)
    yield built
    await built.ledgers.close()


def interrupted(site: Site) -> Interrupted:
    assert isinstance(site.jobs, Interrupted)
    return site.jobs


async def submitted(site: Site, number: int) -> set[str]:
    """Jobs that are in the store, and not open yet."""
    jobs: set[str] = set()
    for _ in range(number):
        await site.submit()
        jobs.add(site.job_id)
    await site.ledgers.close()
    return jobs


@pytest.mark.parametrize("verb", ["live", "get", "claim"])
async def test_jobs_that_were_not_reached_are_opened_later(site: Site, verb: str) -> None:
    jobs = await submitted(site, 3)
    interrupted(site).fails = verb
    with pytest.raises(StoreError):
        await site.ledgers.open_all()
    assert not site.ledgers.active
    await site.ledgers.open_missing()
    assert set(site.ledgers.active) == jobs


@pytest.mark.parametrize("verb", ["live", "get"])
async def test_a_job_that_ends_while_it_is_looked_up_stays_over(site: Site, verb: str) -> None:
    await submitted(site, 1)
    jobs, end = interrupted(site), site.job_service.set_state
    jobs.by = partial(end, site.job_id, JobState.FAILED, reason="meanwhile")
    jobs.followed = verb
    if verb == "live":
        await site.ledgers.open_all()
    else:
        await site.ledgers.find(site.job_id)
    assert not site.ledgers.active
    assert (await site.ledger()).closed


@pytest.mark.parametrize("again", [True, False], ids=["request comes again", "it does not"])
async def test_a_job_whose_record_was_written_without_a_reply_is_opened(
    site: Site, wire: Wire, tmp_path: Path, sites: Sites, again: bool
) -> None:
    del site
    cuttable = sites(Store(client_of(f"unix://{tmp_path / 'w'}")), tmp_path)
    spec = JobSpec.model_validate(
        {
            "name": "job",
            "model": {"path": "m"},
            "tasks": {"environment": "arithmetic"},
            "reward": [{"kind": "exact"}],
            "stop": {"steps": 3},
        }
    )
    wire.cut(b'"max_staleness"', done=True)  # which nothing else sends
    with pytest.raises(StoreError):
        await cuttable.job_service.submit(spec, request_id="r", files={})
    (job_id,) = [job.status.job_id for job in await cuttable.jobs.live()]
    assert not cuttable.ledgers.active
    if again:
        job = await cuttable.job_service.submit(spec, request_id="r", files={})
        assert job.status.job_id == job_id
    else:
        await cuttable.ledgers.open_missing()
    assert set(cuttable.ledgers.active) == {job_id}
    await cuttable.ledgers.close()
    await cuttable.store.close()


async def test_failed_trials_before_a_success_are_forgotten(
    sites: Sites, store: Store, tmp_path: Path
) -> None:
    site = sites(store, tmp_path, trial=Trial(), retry_s=0.0)
    await submitted(site, 1)
    for _ in range(2):
        for opens in (False, False, True):
            await site.ledgers.open_all()
            assert bool(site.ledgers.active) is opens
        await site.ledgers.close()
    assert (await site.status()).state == "queued"


async def test_a_job_that_is_over_is_read_without_its_tasks(site: Site, store: Store) -> None:
    await site.submit()
    await site.begin(0)
    await site.train()
    before = await (await site.ledger()).live()
    await site.job_service.cancel(site.job_id, reason="")
    await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")

    spec = (await site.jobs.get(site.job_id)).spec
    text = spec.replace('"arithmetic"', '"not_installed"')
    assert text != spec
    await store.command("SET", job_key("default", site.job_id, "spec"), text)
    await site.die()
    ledger = await site.ledger()
    assert (await ledger.verify()).ok
    assert (await ledger.live()).trained_tokens == before.trained_tokens > 0
    assert len(await site.listed()) == 4
    assert await ledger.leases.lease(worker_id="w", train=8, evals=8) == []
