"""Probes of a rollout worker, with an engine whose clock can be stopped: it hangs as a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config.service import ProbeSettings
from paceline.platform.server.liveness import ProcessProgress
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import connect
from paceline.plugins import EngineRequest
from paceline.types import PolicyVersion, SamplingParams
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights import HttpTransport, TransportSettings
from paceline.weights.canary import NO_CANARY, Canary, CanaryRule
from paceline_harness.patience import PATIENCE_S
from paceline_rollout.engines.simulated import SimulatedEngine
from paceline_rollout.liveness import RolloutLiveness
from paceline_rollout.streams import CallerRequest, StreamMultiplexer
from paceline_rollout.weight_updater import WeightUpdater

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

SETTINGS = ProbeSettings(silent_s=10, dead_s=60)


@dataclass
class Header:
    version: int = 3
    step: int = 3
    tied: tuple[str, ...] = ()
    canary: Canary = NO_CANARY


class Snapshot:
    header = Header()


class Worker:
    """A hub on a simulated engine, and what its probes see on a clock of their own."""

    def __init__(self, roster: RosterAsyncStub) -> None:
        self.frozen_at: float | None = None
        self.now = 0.0
        self.engine = SimulatedEngine(
            model_dir=None,
            dtype="float32",
            max_context=64,
            max_concurrent=8,
            threads=1,
            tokenizer_dir=None,
            job_id="job",
            vocab_size=32,
            tick_s=0.002,
            clock=lambda: time.monotonic() if self.frozen_at is None else self.frozen_at,
        )
        self.multiplexer = StreamMultiplexer(engine=self.engine)
        self.stream = self.multiplexer.attach()
        self.updater = WeightUpdater(
            roster=roster,
            engine=self.engine,
            transport=HttpTransport(TransportSettings(host="127.0.0.1")),
            job_id="job",
            worker_id="r0",
            activation="in_flight",
            rule=CanaryRule(),
            max_refusals=3,
            metrics=Metrics(),
            changed=_ignore,
        )
        self.progress = ProcessProgress(SETTINGS, clock=lambda: self.now)
        RolloutLiveness(
            engine=self.engine, multiplexer=self.multiplexer, updater=self.updater, max_lag=2
        ).register(self.progress)

    def ask(self, name: str, *, pinned: int = -1) -> None:
        sampling = SamplingParams(max_tokens=8)
        generation = EngineRequest(name, (1, 2), sampling, pinned_version=pinned, sampled=0)
        self.multiplexer.submit(self.stream, [CallerRequest(generation)])

    async def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.progress.check()
            await asyncio.sleep(0)

    @property
    def verdict(self) -> tuple[bool, bool]:
        """Whether it is ready, and alive."""
        return not self.progress.why_unready(), not self.progress.why_dead()


async def _ignore(version: int, healthy: bool) -> None:
    pass


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with connect("127.0.0.1:1") as channel:
        made = Worker(RosterStub(channel))
        await made.engine.start()
        passing = asyncio.create_task(made.multiplexer.run())
        yield made
        made.frozen_at = None
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
        await made.engine.close()


async def loaded(worker: Worker) -> None:
    snapshot: Any = Snapshot()
    await worker.engine.load(snapshot, "in_flight")


async def test_an_engine_that_hangs_makes_the_probes_fail(worker: Worker) -> None:
    await loaded(worker)
    await worker.passes(1000)
    assert worker.verdict == (True, True)
    worker.frozen_at = time.monotonic()
    worker.ask("a")
    await worker.passes(15)
    assert worker.verdict == (False, True)
    assert worker.progress.why_unready().startswith("tokens: 1 pending, no progress for")
    await worker.passes(60)
    assert worker.verdict == (False, False)
    worker.frozen_at = None
    async with asyncio.timeout(PATIENCE_S):
        while worker.multiplexer.num_open:
            await asyncio.sleep(0.01)
    await worker.passes(1)
    assert worker.verdict == (True, True)
    assert worker.progress.status()["work"]["tokens"]["last_s"] == 0


async def test_without_weights_and_for_a_version_to_come_requests_only_wait(
    worker: Worker,
) -> None:
    worker.ask("without weights")
    await worker.passes(1000)
    assert worker.verdict == (True, True)
    await loaded(worker)
    async with asyncio.timeout(PATIENCE_S):
        while worker.multiplexer.num_open:
            await asyncio.sleep(0.01)
    worker.ask("later", pinned=9)
    await worker.passes(1000)
    assert worker.verdict == (True, True)


async def test_weights_that_stay_behind_make_it_unready_and_not_dead(worker: Worker) -> None:
    await loaded(worker)
    updater = worker.updater
    updater.active = PolicyVersion(version=3, step=3)
    updater.newest = PolicyVersion(version=5, step=5)
    await worker.passes(1000)
    assert worker.verdict == (True, True)
    updater.newest = PolicyVersion(version=6, step=6)
    await worker.passes(1000)
    assert worker.verdict == (False, True)
    told = worker.progress.status()
    assert (told["version"], told["newest_version"], told["version_lag"]) == (3, 6, 3)
    updater.active = PolicyVersion(version=6, step=6)
    await worker.passes(1)
    assert worker.verdict == (True, True)
