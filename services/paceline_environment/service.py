"""Assembles an environment worker and runs it on the chassis."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from paceline.config.load import validate
from paceline.config.service import EnvironmentOptions
from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline.isolation.code.folders import CodeFolders
from paceline.isolation.code.packages import Packages
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.tokenizers.jobs import tokenizers_of
from paceline.isolation.code.world_process import MODULE
from paceline.platform.server import artifacts
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.server.membership import Membership
from paceline.platform.transport.endpoints import WorkerEndpoints
from paceline.platform.transport.linger import linger_s
from paceline.platform.transport.rpc import connect_as
from paceline.types import Worker
from paceline.v1.environment_pb2_grpc import add_EnvironmentServicer_to_server
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline_environment.episodes.calls import EnvironmentCalls
from paceline_environment.episodes.peers import EpisodePeers
from paceline_environment.jobs import Jobs
from paceline_environment.leases import LeaseClient
from paceline_environment.rollouts.failover import PolicyClient
from paceline_environment.rollouts.router import RolloutRouter
from paceline_environment.roster import WorkerWatch
from paceline_environment.scoring import Scoring
from paceline_environment.servicer import EnvironmentServicer
from paceline_environment.stages import Stages
from paceline_environment.submitter import Submitter
from paceline_environment.worker import EpisodeWorker, WorkerCapacity
from paceline_environment.worlds.factories import check_settings
from paceline_environment.worlds.worlds import JobWorlds

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

_LEASES_DRAIN_S = 3.0
# Episodes that one reply has scored are submitted together, and their slots become free together:
# scores wait for more of them, so that all three messages are fewer, and no later one waits again.
_SCORE_LINGERS = 3.0
_CREDIT_LINGERS = 0.2


class EnvironmentService(Service):
    """Leases episodes from experience and runs them until it is stopped."""

    def __init__(self, chassis: Chassis, options: EnvironmentOptions) -> None:
        settings = chassis.settings
        self._chassis, self._options = chassis, options
        self._channel = connect_as(settings, settings.experience)
        experience: ExperienceAsyncStub = ExperienceStub(self._channel)
        roster: RosterAsyncStub = RosterStub(self._channel)
        self._rollouts = WorkerWatch(roster=roster, kind=WorkerKind.ROLLOUT, site=settings.site)
        self._rewards = WorkerWatch(roster=roster, kind=WorkerKind.REWARD)
        self._sandbox = sandbox_for(MODULE, lowest=options.sandbox_level)
        self._code = CodeFolders(
            partial(artifacts.fetch_into, experience),
            packages=Packages(settings.packages, metrics=chassis.metrics),
        )
        self._tokenizers = tokenizers_of(settings.tokenizers, linger=self._linger)
        self._worlds = self._make_worlds()
        # Samples are not to be answered from what others have been told.
        self._endpoints = WorkerEndpoints(options.endpoints, cache_bytes=0)
        self.stages = Stages(usage=chassis.usage)
        self._router = RolloutRouter(
            workers=self._rollouts,
            stages=self.stages,
            metrics=chassis.metrics,
            prefix_value=options.prefix_worth,
        )
        self._policy = PolicyClient(
            router=self._router,
            connect=partial(connect_as, settings, kind=WorkerKind.ROLLOUT),
            stages=self.stages,
            metrics=chassis.metrics,
            linger=self._linger,
        )
        self._scoring = Scoring(
            workers=self._rewards,
            connect=partial(connect_as, settings, kind=WorkerKind.REWARD),
            timeout_s=options.score_timeout_s,
            linger=lambda: _SCORE_LINGERS * self._linger(),
        )
        self._submitter = Submitter(experience=experience, linger=self._linger)
        self.worker = EpisodeWorker(
            jobs=self._jobs(experience),
            peers=self._peers(),
            submitter=self._submitter,
            limits=_capacity(options),
            metrics=chassis.metrics,
        )
        self._leases = LeaseClient(
            experience=experience,
            worker_id=settings.worker_id,
            environments=options.environments,
            hello=self.worker.hello,
            receive=self.worker.receive,
            linger=lambda: _CREDIT_LINGERS * self._linger(),
        )
        self.worker.attach(self._leases)
        chassis.usage.measure_slots(
            lambda: self.worker.num_open, capacity=options.slots + options.eval_slots
        )
        self._membership = self._make_membership(roster)
        self._tasks: list[asyncio.Task[None]] = []
        progress = chassis.health.progress
        progress.watch(
            "steps", self.stages.progress, min_limit_s=lambda: self.worker.longest_step_s
        )
        progress.add_status(self.stages.status)
        add_EnvironmentServicer_to_server(self._servicer(), chassis.server)

    async def run(self) -> None:
        """Run in separate tasks, so that draining can still use the streams."""
        parts = {
            "rollouts": self._rollouts.run(),
            "rewards": self._rewards.run(),
            "membership": self._membership.run(),
            "leases": self._leases.run(),
            "episodes": self.worker.run(),
            "worlds": self._worlds.sweep(),
        }
        self._tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    def _make_membership(self, roster: RosterAsyncStub) -> Membership:
        return Membership(
            roster=roster,
            report=self.report,
            ended=self._end_job,
            kept=lambda: self._worlds.jobs | self._tokenizers.jobs,
            usage=self._chassis.usage.totals,
        )

    def _make_worlds(self) -> JobWorlds:
        return JobWorlds(
            sandbox=self._sandbox,
            folders=self._code,
            memory_bytes=self._options.code_memory_bytes,
            max_processes=self._options.max_code_processes,
            metrics=self._chassis.metrics,
        )

    def _jobs(self, experience: ExperienceAsyncStub) -> Jobs:
        jobs: JobsAsyncStub = JobsStub(self._channel)
        return Jobs(
            jobs=jobs,
            experience=experience,
            worlds=self._worlds,
            tokenizers=self._tokenizers,
            limits=self._chassis.settings.limits,
            settings=self._options.worlds,
            endpoints=self._endpoints,
        )

    def _servicer(self) -> EnvironmentServicer:
        return EnvironmentServicer(
            worker_id=self._chassis.settings.worker_id,
            slots=self._options.slots,
            stages=self.stages,
            num_open=lambda: self.worker.num_open,
        )

    def _peers(self) -> EpisodePeers:
        chassis = self._chassis
        return EpisodePeers(
            chassis.settings.worker_id,
            self._policy,
            self._scoring,
            self.stages,
            EnvironmentCalls(metrics=chassis.metrics),
            chassis.metrics,
            tracer=chassis.tracer,
        )

    async def _end_job(self, job_id: str) -> None:
        self.stages.end(job_id)
        await self._tokenizers.end(job_id)
        await self._worlds.end(job_id)

    def _linger(self) -> float:
        return linger_s(self.worker.num_open)

    async def drain(self) -> None:
        """Give open episodes back with their progress."""
        await self._membership.leave()
        await self.worker.drain()
        self._leases.finish()
        leases = [task for task in self._tasks if task.get_name() == "leases"]
        if leases:
            await asyncio.wait(leases, timeout=_LEASES_DRAIN_S)

    async def close(self) -> None:
        """Cancel all tasks and close all channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._submitter.close()
        await self._tokenizers.close()
        await self._worlds.close()
        await self._sandbox.close()
        await self._code.close()
        await self._scoring.close()
        await self._policy.close()
        await self._endpoints.close()
        await self._channel.close()

    def report(self) -> Worker:
        """The worker and its load for the roster."""
        settings, waiting = self._chassis.settings, self.stages.waiting
        busy_s = time.process_time()
        load: dict[str, float] = {
            "open": self.worker.num_open,
            "slots": self._options.slots,
            "finished": self.stages.finished,
            "infra_errors": self.stages.infra_errors,
            "queued_tokens": self._router.queued_tokens.total(),
            "tokens_lost": self.stages.tokens_lost,
            "tokens_resumed": self.stages.tokens_resumed,
            "busy_s": busy_s,
            "cpu_s": busy_s,
        }
        load.update(self._sandbox.load())
        load.update({f"waiting_{stage}": float(count) for stage, count in waiting.items()})
        return Worker(
            worker_id=settings.worker_id,
            kind=WorkerKind.ENVIRONMENT,
            endpoint=self._chassis.address,
            site=settings.site,
            job_id=settings.job_id,
            load=load,
            phases=self.stages.phases(),
        )


async def build(chassis: Chassis) -> EnvironmentService:
    """An environment worker from the settings of its process."""
    if not chassis.settings.experience:
        raise ConfigError("experience: host:port of the experience service is required")
    options = validate(EnvironmentOptions, chassis.settings.options)
    check_settings(options.worlds)
    return EnvironmentService(chassis, options)


def _capacity(options: EnvironmentOptions) -> WorkerCapacity:
    return WorkerCapacity(options.slots, options.eval_slots, options.flush_s, options.flush_tokens)
