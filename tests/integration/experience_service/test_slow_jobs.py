"""A slow job delays neither other jobs nor the roster."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.v1 import options_pb2, roster_pb2, types_pb2
from paceline_experience.jobs.dry_run import DryRun, UntriedError
from paceline_experience.ledger.ledger import JobLedger
from paceline_harness.patience import call

if TYPE_CHECKING:
    from conftest import Client, Lives

pytestmark = pytest.mark.timeout(100)


async def expires(client: Client) -> None:
    """Join a worker without heartbeats; returns when it has been removed from the roster."""
    worker = types_pb2.Worker(worker_id="r1", kind=options_pb2.WORKER_KIND_REWARD)
    await call(client.roster.Join, roster_pb2.JoinRequest(worker=worker))
    while True:
        reply = await call(
            client.roster.ListWorkers,
            roster_pb2.ListWorkersRequest(kind=options_pb2.WORKER_KIND_REWARD),
        )
        if not reply.workers:
            return
        await asyncio.sleep(0.05)


async def test_a_job_that_hangs_while_it_is_opened(
    lives: Lives, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lives(store_url, tmp_path) as client:
        await client.submit()
    hangs = asyncio.Event()

    async def check(*_: Any) -> None:
        if not hangs.is_set():
            hangs.set()
            raise UntriedError("not at the start")
        await asyncio.Event().wait()

    monkeypatch.setattr(DryRun, "check", check)
    monkeypatch.setattr("paceline_experience.jobs.ledgers.RETRY_S", 0.0)
    async with lives(store_url, tmp_path, member_lease_s=1.0) as client:
        assert hangs.is_set()
        await expires(client)


async def test_a_slow_job_does_not_delay_others(
    lives: Lives, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: Counter[JobLedger] = Counter()

    async def sweep(ledger: JobLedger) -> None:
        swept[ledger] += 1
        if ledger is next(iter(swept)):
            await asyncio.Event().wait()

    monkeypatch.setattr(JobLedger, "sweep", sweep)
    async with lives(store_url, tmp_path, member_lease_s=1.0) as client:
        for _ in range(3):
            await client.submit()
        await expires(client)
        while sum(count > 2 for count in swept.values()) < 2:
            await asyncio.sleep(0.05)
        assert min(swept.values()) == 1
