"""One rank as a process: rank 0 with a server, a place in the roster and weights to give."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from paceline import wire
from paceline.chassis import Chassis, Service
from paceline.config import JobSpec, parse_job
from paceline.config.service import TrainerOptions
from paceline.errors import FencedError, InvalidError, PacelineError, UnavailableError
from paceline.failures import describe
from paceline.logs import Log
from paceline.membership import Membership
from paceline.rpc import connect_as
from paceline.types import Worker, WorkerKind
from paceline.v1 import trainer_pb2 as pb
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.v1.trainer_pb2_grpc import add_TrainerServicer_to_server
from paceline.weights.server import WeightServer
from paceline_trainer.checkpoint import Checkpoints
from paceline_trainer.client import Ledger
from paceline_trainer.distributed import Bell, Group
from paceline_trainer.gauges import Gauges, peak_of, shape_of
from paceline_trainer.learner import Learner
from paceline_trainer.mismatch import mismatch_of
from paceline_trainer.model import load_policy, shard
from paceline_trainer.objectives.base import load_objective
from paceline_trainer.optimizer import Optimizer
from paceline_trainer.place import Place
from paceline_trainer.publish import Copier, Publisher
from paceline_trainer.seed import Seed
from paceline_trainer.servicer import StatusServicer
from paceline_trainer.traces import StepTraces
from paceline_trainer.trainer import Clock, Engine, Trainer
from paceline_trainer.vitals import Vitals

EXIT_INVALID = 2
EXIT_FENCED = 4
ORPHAN_POLL_S = 1.0
BELL_POLL_S = 1.0
SHOW_S = 1.0
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
log = Log("service")


class TrainerService(Service):
    """Builds the trainer once experience has told the job, runs it, and lets it end well."""

    def __init__(self, *, chassis: Chassis, options: TrainerOptions, place: Place) -> None:
        self._chassis = chassis
        self._options = options
        self._place = place
        self._settings = chassis.settings
        self._clock = Clock()
        self._channel = connect_as(chassis.settings, chassis.settings.experience)
        self._roster = RosterStub(self._channel)
        self._ledger = Ledger(
            experience=ExperienceStub(self._channel),
            roster=self._roster,
            jobs=JobsStub(self._channel),
            job_id=chassis.settings.job_id,
            incarnation=options.incarnation,
        )
        self._weights = WeightServer(
            host=chassis.settings.host,
            port=options.weights_port,
            advertise_host=chassis.address.rsplit(":", 1)[0],
            metrics=chassis.metrics,
            tls=chassis.settings.tls,
            bytes_per_s=options.weights_bytes_per_s,
            patient=True,
        )
        self._endpoint = ""
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._group: Group | None = None
        self._bell: Bell | None = None
        self._publisher: Publisher | Seed | None = None
        self._trainer: Trainer | None = None
        self._work: asyncio.Task[None] | None = None
        self._membership: Membership | None = None
        self._background: list[asyncio.Task[None]] = []
        self.exit_code = 0

    async def start(self) -> None:
        """Watch the parent; the first rank of a node serves weights, rank 0 also answers calls."""
        self._background.append(asyncio.create_task(self._watch_parent(), name="parent"))
        vitals = Vitals(clock=self._clock, trainer=lambda: self._trainer)
        vitals.register(self._chassis.health.progress)
        if self._place.seeds:
            self._endpoint = await self._weights.start()
        if self._place.first:
            servicer = StatusServicer(self._status)
            add_TrainerServicer_to_server(servicer, self._chassis.server)
            self._membership = Membership(
                roster=self._roster, report=self._report, progress=self._weights.progress
            )
            beat = asyncio.create_task(self._membership.run(), name="membership")
            self._background.append(beat)

    async def run(self) -> None:
        """Train; a signal cancels only the waiting, see `drain`."""
        self._work = asyncio.create_task(self._train(), name="train")
        await asyncio.shield(self._work)

    async def drain(self) -> None:
        """Finish the step under way, commit and checkpoint it, and let all ranks do so."""
        await self._ring()
        if self._trainer is not None:
            self._trainer.stop()
        elif self._work is not None:
            self._work.cancel()
        if self._work is not None:
            await asyncio.wait({self._work})
            if not self._work.cancelled() and (error := self._work.exception()) is not None:
                log.error("the last step failed", error=error)
                self.exit_code = self.exit_code or 1

    async def close(self) -> None:
        """Leave the roster and the group."""
        for task in self._background:
            task.cancel()
        if self._membership is not None:
            await self._membership.leave()
        await self._weights.close()
        if self._group is not None:
            await self._in_thread(self._group.close)
        self._compute.shutdown(wait=False)
        await self._channel.close()

    async def _train(self) -> None:
        try:
            spec = parse_job(json.loads((await self._ledger.job()).spec))
            engine = await self._in_thread(self._build, spec)
            self._trainer = self._make(engine, spec)
            self._background.append(asyncio.create_task(self._listen(), name="bell"))
            await self._trainer.run()
        except FencedError as error:
            log.warning("a newer incarnation runs", error=error)
            self.exit_code = EXIT_FENCED
        except InvalidError as error:
            log.error("cannot train this job", error=error)
            self.exit_code = EXIT_INVALID
            await self._give_up(error)
        except Exception as error:  # the boundary of this rank
            await self._report_failure(error)
            raise

    async def _report_failure(self, error: Exception) -> None:
        """Say why before the other ranks, whose collectives break off, say that they were left."""
        reason = f"{describe(error)} (rank {self._place.rank})"
        log.error("ends", reason=reason)
        try:
            await self._ledger.report_failure(reason)
        except PacelineError as refused:
            log.warning("cannot tell why", error=refused)

    async def _give_up(self, error: InvalidError) -> None:
        """Torchrun turns every exit code into 1, so the reason has to go another way."""
        if not self._place.first:
            return
        try:
            await self._ledger.fail(error.message)
        except PacelineError as refused:
            log.warning("cannot fail the job", error=refused)

    def _build(self, spec: JobSpec) -> Engine:
        """Everything that computes, in the thread that will compute."""
        torch.set_num_threads(spec.trainer.threads)
        torch.manual_seed(spec.tasks.seed)
        trainer = spec.trainer
        objective = load_objective(trainer.objective)
        policy = load_policy(spec.model.path, gradient_checkpointing=trainer.gradient_checkpointing)
        group = self._group = Group(self._place)
        self._bell = Bell(self._place)
        shard(policy, group, dtype=trainer.dtype)
        optimizer = Optimizer(policy, trainer.optimizer, total_steps=spec.stop.steps)
        mismatch = mismatch_of(spec, policy, group)
        learner = Learner(
            policy=policy,
            optimizer=optimizer,
            objective=objective,
            group=group,
            budget=trainer.tokens_per_micro_batch,
            mini_batches=trainer.mini_batches,
            mismatch=mismatch,
        )
        base = self._settings.storage or self._settings.run_dir
        checkpoints = Checkpoints(
            f"{base}/jobs/{self._settings.job_id}/checkpoints",
            group=group,
            keep=trainer.checkpoint.keep,
            incarnation=self._options.incarnation,
        )
        copier = Copier(policy, group, engine_dtype=spec.model.dtype, dtype=trainer.dtype)
        return Engine(policy, optimizer, learner, checkpoints, copier, mismatch, group)

    def _make(self, engine: Engine, spec: JobSpec) -> Trainer:
        self._publisher = self._make_publisher()
        return Trainer(
            engine=engine,
            ledger=self._ledger,
            publisher=self._publisher,
            compute=self._compute,
            spec=spec.trainer,
            clock=self._clock,
            traces=StepTraces(
                self._chassis.tracer,
                job_id=self._settings.job_id,
                incarnation=self._options.incarnation,
                rank=self._place.rank,
            ),
            gauges=self._make_gauges(engine, spec),
            # Waits are counted once for a job, however many ranks it has.
            usage=self._chassis.usage if self._place.first else None,
        )

    def _make_gauges(self, engine: Engine, spec: JobSpec) -> Gauges:
        policy, device = engine.policy, engine.group.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        config = policy.config.get_text_config()
        gauges = Gauges(
            self._chassis.metrics,
            job_id=self._settings.job_id,
            seconds=self._clock.so_far,
            shape=shape_of(config, parameters=policy.num_parameters, tied=bool(policy.tied)),
            peak=peak_of(name, spec.trainer.dtype),
        )
        self._chassis.usage.measure_seconds(gauges.busy_s)
        show = asyncio.create_task(_every(SHOW_S, gauges.show), name="gauges")
        self._background.append(show)
        return gauges

    def _make_publisher(self) -> Publisher | Seed | None:
        place = self._place
        if place.first:
            return Publisher(
                ledger=self._ledger,
                server=self._weights,
                endpoint=self._endpoint,
                incarnation=self._options.incarnation,
                parts=place.nodes,
            )
        if place.seeds and place.nodes > 1:
            return Seed(
                ledger=self._ledger,
                server=self._weights,
                endpoint=self._endpoint,
                part=place.node,
                parts=place.nodes,
                tls=self._settings.tls,
            )
        return None

    async def _in_thread(
        self, work: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compute, lambda: work(*args, **kwargs))

    async def _watch_parent(self) -> None:
        """End at once without torchrun: its other ranks are ending too, collectives would hang."""
        while not self._place.orphaned:
            await asyncio.sleep(ORPHAN_POLL_S)
        log.error("torchrun is gone", rank=self._place.rank)
        os._exit(1)

    async def _ring(self) -> None:
        """Tell the other ranks of a signal; they know of a job that has ended."""
        ended = self._work is None or self._work.done()
        if self._bell is None or ended:
            return
        try:
            await asyncio.to_thread(self._bell.ring)
        except UnavailableError as error:
            log.warning("cannot tell the other ranks", error=error)

    async def _listen(self) -> None:
        """Stop when another rank has to."""
        assert self._bell is not None
        try:
            while not await asyncio.to_thread(self._bell.rung):
                await asyncio.sleep(BELL_POLL_S)
        except UnavailableError as error:
            log.warning("cannot hear the other ranks", error=error)
            return
        self._chassis.stop()

    def _report(self) -> Worker:
        seconds = self._clock.so_far()
        published = self._publisher.published if self._publisher is not None else None
        return Worker(
            worker_id=self._settings.worker_id,
            kind=WorkerKind.TRAINER,
            endpoint=self._chassis.address,
            site=self._settings.site,
            job_id=self._settings.job_id,
            active_version=-1 if published is None else published.version,
            weights_endpoint=self._endpoint,
            load={
                "cpu_s": time.process_time(),
                "wait_s": seconds.get("waiting", 0.0),
                "step_s": seconds.get("stepping", 0.0),
                "checkpoint_s": seconds.get("checkpointing", 0.0),
                "publish_s": seconds.get("publishing", 0.0),
                "tokens": 0.0 if self._trainer is None else self._trainer.tokens,
            },
            pid=os.getpid(),
        )

    def _status(self) -> pb.TrainerStatus:
        published = self._publisher.published if self._publisher is not None else None
        return pb.TrainerStatus(
            job_id=self._settings.job_id,
            incarnation=self._options.incarnation,
            step=0 if self._trainer is None else self._trainer.step,
            published=None if published is None else wire.version_to(published),
            phase=self._clock.phase,
            seconds=self._clock.seconds,
        )


async def _every(seconds: float, work: Callable[[], None]) -> None:
    while True:
        work()
        await asyncio.sleep(seconds)
