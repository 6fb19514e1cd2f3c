"""A trainer whose steps take a fixed time: a client of the ledger that publishes real snapshots."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.enums import WorkerKind
from paceline.platform.server.membership import Membership
from paceline.platform.transport.rpc import connect
from paceline.types import Worker
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights import SnapshotHeader, WeightServer, plan
from paceline_trainer.client import TrainerLedger
from paceline_trainer.columns import Share

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

INCARNATION = 1
VALUES = 16_384  # of the only tensor


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step: when it was committed, how long the trainer had waited, what it trained."""

    committed_s: float
    waited_s: float
    episodes: int
    turns: int
    tokens: int
    age: float  # mean over policy tokens, in steps


@dataclass(slots=True)
class SimulatedTrainer:
    """Takes batches, sleeps for `train_s`, commits and publishes."""

    address: str
    credential: str
    job_id: str
    train_s: float
    steps: list[TrainedStep] = field(default_factory=list[TrainedStep])

    async def run(self, steps: int, *, on_step: Callable[[int], None] = lambda step: None) -> None:
        """Train this many steps; `on_step` is called after each with the number of steps."""
        async with connect(self.address, token=self.credential) as channel:
            experience: ExperienceAsyncStub = ExperienceStub(channel)
            roster: RosterAsyncStub = RosterStub(channel)
            jobs: JobsAsyncStub = JobsStub(channel)
            ledger = TrainerLedger(
                experience=experience,
                roster=roster,
                jobs=jobs,
                job_id=self.job_id,
                incarnation=INCARNATION,
            )
            server = WeightServer(host="127.0.0.1", keep_streaming=True)
            endpoint = await server.start()
            member = Membership(
                roster=roster, report=lambda: self._report(endpoint), progress=server.progress
            )
            joined = asyncio.create_task(member.run(), name="member")
            try:
                await ledger.rewind(0)
                await self._publish(ledger, server, endpoint, 0)
                for step in range(steps):
                    await self._train(ledger, step)
                    await self._publish(ledger, server, endpoint, step + 1)
                    on_step(step + 1)
            finally:
                joined.cancel()
                await server.close()

    async def _train(self, ledger: TrainerLedger, step: int) -> None:
        began = time.monotonic()
        share = await ledger.take(step, rank=0, world=1)
        waited_s = time.monotonic() - began
        await asyncio.sleep(self.train_s)
        await ledger.commit(step, share.batch_id, {})
        self.steps.append(_trained(share, time.monotonic(), waited_s))

    async def _publish(
        self, ledger: TrainerLedger, server: WeightServer, endpoint: str, step: int
    ) -> None:
        entries, size = plan([("weight", "float32", (VALUES,))])
        numbered = await ledger.publish_version(
            step=step, parent=step - 1, endpoint=endpoint, num_bytes=size, part=0, parts=1
        )
        header = SnapshotHeader(
            job_id=self.job_id,
            version=numbered.version.version,
            step=step,
            parent_version=step - 1,
            base_version=-1,
            incarnation=INCARNATION,
            num_bytes=size,
            chunk_bytes=numbered.chunk_bytes,
            tensors=entries,
        )
        staging = server.stage(header, key=numbered.key)
        staging.fill(entries[0].offset, bytes(4 * VALUES))
        staging.finish()

    def _report(self, endpoint: str) -> Worker:
        return Worker(
            worker_id=f"trainer-{self.job_id}",
            kind=WorkerKind.TRAINER,
            endpoint="127.0.0.1:1",
            site="local",
            job_id=self.job_id,
            weights_endpoint=endpoint,
            pid=os.getpid(),
        )


def _trained(share: Share, committed_s: float, waited_s: float) -> TrainedStep:
    runs = [(run, sample) for sample in share.samples for run in sample.versions]
    tokens = sum(run.count for run, _ in runs)
    ages = sum(
        (share.step - share.age_steps.get(run.version, share.step)) * run.count for run, _ in runs
    )
    return TrainedStep(
        committed_s=committed_s,
        waited_s=waited_s,
        episodes=len({(sample.group_id, sample.index) for sample in share.samples}),
        turns=sum(_turns(sample) for sample in share.samples),
        tokens=tokens,
        age=ages / max(tokens, 1),
    )


def _turns(sample: pb.TrainSample) -> int:
    return sum(span.source == types_pb2.TOKEN_SOURCE_POLICY for span in sample.spans)
