"""Which ledgers are open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from paceline.config import JobSpec
from paceline.enums import JobState
from paceline.errors import StoreError
from paceline_experience.jobs.dry_run import UntriedError
from paceline_experience.store.store import Store, client_of
from paceline_harness.wires import Wire

if TYPE_CHECKING:
    from conftest import Site, Sites


@pytest.fixture
async def site(sites: Sites, store: Store, tmp_path: Path) -> AsyncIterator[Site]:
    made = sites(store, tmp_path)
    yield made
    await made.ledgers.close()


async def submitted(site: Site, number: int) -> set[str]:
    """Jobs that are in the store, and not open yet."""
    jobs: set[str] = set()
    for _ in range(number):
        await site.submit()
        jobs.add(site.job_id)
    await site.ledgers.close()
    return jobs


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, verb: str) -> None:
    whole = getattr(owner, verb)

    async def failing(*told: Any, **more: Any) -> Any:
        monkeypatch.setattr(owner, verb, whole)
        raise StoreError("away")

    monkeypatch.setattr(owner, verb, failing)


@pytest.mark.parametrize("verb", ["live", "get", "claim"])
async def test_jobs_that_were_not_reached_are_opened_later(
    site: Site, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    jobs = await submitted(site, 3)
    fails_once(monkeypatch, site.jobs, verb)
    with pytest.raises(StoreError):
        await site.ledgers.open_all()
    assert not site.ledgers.active
    await site.ledgers.open_missing()
    assert set(site.ledgers.active) == jobs


@pytest.mark.parametrize("verb", ["live", "get"])
async def test_a_job_that_ends_while_it_is_looked_up_stays_over(
    site: Site, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    await submitted(site, 1)
    whole = getattr(site.jobs, verb)

    async def late(*told: Any) -> Any:
        found = await whole(*told)
        monkeypatch.setattr(site.jobs, verb, whole)
        await site.job_service.set_state(site.job_id, JobState.FAILED, reason="meanwhile")
        return found

    monkeypatch.setattr(site.jobs, verb, late)
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
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submitted(site, 1)
    ends = iter([False, False, True, False, False, True])

    class Trial:
        async def check(self, spec: JobSpec, data: object = None) -> None:
            del data
            if not next(ends):
                raise UntriedError(f"{spec.name}: no process")

    cast(Any, site.ledgers)._dry_run = Trial()
    monkeypatch.setattr("paceline_experience.jobs.ledgers._RETRY_S", 0.0)
    for _ in range(2):
        for opens in (False, False, True):
            await site.ledgers.open_all()
            assert bool(site.ledgers.active) is opens
        await site.ledgers.close()
    assert (await site.status()).state == "queued"


async def test_a_job_that_is_over_is_read_without_its_tasks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.submit()
    await site.begin(0)
    await site.train()
    before = await (await site.ledger()).live()
    await site.job_service.cancel(site.job_id, reason="")
    await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")

    def hang(*_: Any) -> None:
        raise AssertionError("tasks of a job that is over are built")

    monkeypatch.setattr("paceline_experience.jobs.own_tasks.task_sources", hang)
    await site.die()
    ledger = await site.ledger()
    assert (await ledger.verify()).ok
    assert (await ledger.live()).trained_tokens == before.trained_tokens > 0
    assert len(await site.listed()) == 4
    assert await ledger.lease(worker_id="w", train=8, evals=8) == []
