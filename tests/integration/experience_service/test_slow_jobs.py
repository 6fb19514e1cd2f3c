"""A slow job delays neither other jobs nor the roster."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import JobSpec
from paceline.config.service import ExperienceOptions
from paceline.data import JobData
from paceline.platform.server.chassis import Chassis
from paceline.v1 import options_pb2, roster_pb2, types_pb2
from paceline_experience.jobs.dry_run import DryRun, UntriedError
from paceline_experience.jobs.ledgers import OpenLedger
from paceline_experience.service import ExperienceService
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client
    from paceline_harness.experience_service.serving import Lives

LEASE_S = 1.0  # of members of the roster


class HangsAfterTheStart(DryRun):
    """Takes too long once, then forever."""

    def __init__(self) -> None:
        super().__init__(timeout_s=60, memory_bytes=1 << 30)
        self.hangs = asyncio.Event()

    async def check(self, spec: JobSpec, data: JobData) -> None:
        if not self.hangs.is_set():
            self.hangs.set()
            raise UntriedError("not at the start")
        await asyncio.Event().wait()


async def service_of(
    chassis: Chassis, *, dry_run: DryRun | None = None, **changes: Any
) -> ExperienceService:
    """The service with other parts."""
    options = ExperienceOptions.model_validate(chassis.settings.options)
    store = await Store.connect(chassis.settings.store_url, wait_s=options.store_wait_s)
    trial = dry_run or DryRun(timeout_s=PATIENCE_S, memory_bytes=options.plugins_bytes)
    return ExperienceService(chassis, store=store, options=options, dry_run=trial, **changes)


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
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path) as client:
        await client.submit()
    trial = HangsAfterTheStart()
    make = partial(service_of, dry_run=trial, retry_s=0.0)
    async with lives(store_url, tmp_path, make=make, member_lease_s=LEASE_S) as client:
        assert trial.hangs.is_set()
        await expires(client)


async def test_a_slow_job_does_not_delay_others(
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    swept: Counter[str] = Counter()

    async def first_hangs(entry: OpenLedger) -> None:
        job_id = entry.job.status.job_id
        swept[job_id] += 1
        if job_id == next(iter(swept)):
            await asyncio.Event().wait()

    make = partial(service_of, sweep=first_hangs)
    async with lives(store_url, tmp_path, make=make, member_lease_s=LEASE_S) as client:
        for _ in range(3):
            await client.submit()
        await expires(client)
        while sum(count > 2 for count in swept.values()) < 2:
            await asyncio.sleep(0.05)
        assert min(swept.values()) == 1
