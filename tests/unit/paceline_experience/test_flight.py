"""What streams of several workers do to the count of episodes in flight."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from paceline.errors import StoreError
from paceline_experience.flight import Flight
from paceline_experience.jobs import JobStore
from paceline_experience.ledgers import Entry
from paceline_experience.store import Store

if TYPE_CHECKING:
    from conftest import Worlds


async def test_a_doubt_ends_once_however_many_streams_settle_it(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    job = await JobStore(store).create(world.spec, artefacts={})
    world.job_id = job_id = job.status.job_id
    ledger = await world.started()
    entry = Entry(job, world.spec, ledger)

    def apart(what: str, job_id: str) -> AbstractContextManager[None]:
        del what, job_id
        return nullcontext()

    ledgers = SimpleNamespace(active={job_id: entry}, apart=apart)
    flight = Flight(cast(Any, ledgers))
    with pytest.raises(StoreError), flight.promise(job_id, 8):
        raise StoreError("gone")
    assert flight.of(entry) == 8
    # The streams meet at the ledger: a lease that has come before them holds it.
    await asyncio.gather(
        ledger.lease(worker_id="w", train=2, evals=0), *(flight.settle() for _ in range(4))
    )
    assert flight.promised(job_id) == 0
    assert flight.by_tenant() == {"default": 2}
