"""The reward process: a scorer behind gRPC, with membership in the roster."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from paceline.config.load import validate
from paceline.config.service import RewardOptions
from paceline.enums import WorkerKind
from paceline.errors import UnavailableError
from paceline.isolation.code.folders import CodeFolders
from paceline.isolation.code.packages import Packages
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.platform.fair_queue import FairQueue
from paceline.platform.server import artifacts
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.server.membership import Membership
from paceline.platform.transport.endpoints import WorkerEndpoints
from paceline.platform.transport.rpc import connect_as
from paceline.types import Worker
from paceline.v1 import reward_pb2_grpc
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline_reward.accepted import AcceptedTargets
from paceline_reward.job_pools import JobPools
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.programs import FairPrograms
from paceline_reward.scorer import Scorer
from paceline_reward.servicer import RewardServicer

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub


async def build(chassis: Chassis) -> RewardService:
    """A reward worker from the settings of its process."""
    return RewardService(chassis, validate(RewardOptions, chassis.settings.options))


class RewardService(Service):
    """Scores episodes of all jobs of its pool."""

    def __init__(self, chassis: Chassis, options: RewardOptions) -> None:
        self._chassis = chassis
        settings = chassis.settings
        address = settings.experience
        self._channel = connect_as(settings, address) if address else None
        self._membership: Membership | None = None
        self._sandbox = Sandbox(lowest=options.sandbox_level)
        self._code = CodeFolders(self._fetch, packages=Packages(settings.packages))
        self._pool = ChildPool(plain_children(), FairQueue(options.processes))
        queue = FairQueue(options.processes)
        self._job_pools = JobPools(
            processes=options.processes,
            memory_bytes=options.code_memory_bytes,
            sandbox_level=options.sandbox_level,
            folder_of=self._code.folder,
            max_processes=options.max_code_processes,
            metrics=chassis.metrics,
        )
        self._endpoints = WorkerEndpoints(options.endpoints)
        self._accepted = AcceptedTargets(JobsStub(self._channel)) if self._channel else None
        self._scorer = Scorer(
            pool=self._pool,
            job_pools=self._job_pools,
            programs=partial(FairPrograms, self._sandbox, queue),
            endpoints=self._endpoints.of,
            allowed=settings.plugins.targets,
            accepted=self._accepted.of if self._accepted else None,
            metrics=chassis.metrics,
        )

    async def start(self) -> None:
        """Register the servicer, and create the membership in the roster."""
        self._chassis.health.progress.watch(
            "scores", self._scorer.progress, min_limit_s=lambda: self._scorer.longest_s
        )
        servicer = RewardServicer(
            scorer=self._scorer, metrics=self._chassis.metrics, tracer=self._chassis.tracer
        )
        reward_pb2_grpc.add_RewardServicer_to_server(servicer, self._chassis.server)
        self._chassis.usage.measure_seconds(lambda: self._scorer.load()["busy_s"])
        if self._channel is not None:
            roster: RosterAsyncStub = RosterStub(self._channel)
            self._membership = Membership(
                roster=roster,
                report=self.report,
                ended=self._end_job,
                kept=self._kept,
                usage=self._chassis.usage.totals,
            )

    async def run(self) -> None:
        """Send heartbeats to the roster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._job_pools.sweep(), name="sweep")
            if self._membership is not None:
                tasks.create_task(self._membership.run(), name="membership")

    def report(self) -> Worker:
        """The worker and its load for the roster."""
        settings = self._chassis.settings
        return Worker(
            worker_id=settings.worker_id,
            kind=WorkerKind.REWARD,
            endpoint=self._chassis.address,
            site=settings.site,
            job_id=settings.job_id,
            load=self._scorer.load() | self._sandbox.load() | {"cpu_s": time.process_time()},
            pid=os.getpid(),
        )

    async def drain(self) -> None:
        """Leave the roster, then wait until no items are in progress."""
        if self._membership is not None:
            await self._membership.leave()
        await self._scorer.idle()

    async def close(self) -> None:
        """Stop the children, and all programs."""
        await self._pool.close()
        await self._job_pools.close()
        await self._sandbox.close()
        await self._endpoints.close()
        if self._channel is not None:
            await self._channel.close()
        await self._code.close()

    def _kept(self) -> set[str]:
        accepted = self._accepted.jobs if self._accepted else set[str]()
        return self._job_pools.jobs | self._code.jobs | accepted

    async def _end_job(self, job_id: str) -> None:
        if self._accepted:
            self._accepted.end(job_id)
        await self._job_pools.end(job_id)
        await self._code.end(job_id)

    async def _fetch(self, digest: str, into: BinaryIO) -> None:
        if self._channel is None:
            raise UnavailableError("this reward worker has no experience service")
        experience: ExperienceAsyncStub = ExperienceStub(self._channel)
        await artifacts.fetch_into(experience, digest, into)
