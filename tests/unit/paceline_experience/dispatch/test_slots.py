"""What streams of several workers do to the count of episodes in accounting."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from paceline.errors import StoreError
from paceline_experience.dispatch.slots import SlotAccounting
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import OpenLedger
from paceline_experience.store.store import Store

if TYPE_CHECKING:
    from paceline_harness.ledgers.world import Worlds


async def test_an_uncertain_lease_is_settled_once(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    job = await JobStore(store).create(JobParts(world.spec), artifacts={})
    world.job_id = job_id = job.status.job_id
    ledger = await world.started()
    entry = OpenLedger(job, world.spec, ledger)

    def isolate(what: str, job_id: str) -> AbstractContextManager[None]:
        del what, job_id
        return nullcontext()

    ledgers = SimpleNamespace(active={job_id: entry}, isolate=isolate)
    accounting = SlotAccounting(cast(Any, ledgers))
    with pytest.raises(StoreError), accounting.reserve(job_id, 8):
        raise StoreError("gone")
    assert accounting.of(entry) == 8
    # The streams meet at the ledger: a lease that has come before them holds it.
    await asyncio.gather(
        ledger.leases.lease(worker_id="w", train=2, evals=0),
        *(accounting.settle() for _ in range(4)),
    )
    assert accounting.reserved(job_id) == 0
    assert accounting.by_tenant() == {"default": 2}
