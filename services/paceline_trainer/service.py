"""One rank as a process; rank 0 also has a server, is in the roster and serves weights."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from paceline.config import JobSpec, job_of
from paceline.config.lifecycle.forks import ForkSpec
from paceline.config.service import TrainerOptions
from paceline.enums import Phase, WorkerKind
from paceline.errors import FencedError, InvalidError, PacelineError, UnavailableError
from paceline.methods.objective.load import load_objective
from paceline.models.resolve import ModelResolver
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.server.cores import threads_for
from paceline.platform.server.failures import describe
from paceline.platform.server.membership import Membership
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import connect_as
from paceline.plugins.allowed import AllowedTargets
from paceline.types import Worker
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.v1.trainer_pb2_grpc import add_TrainerServicer_to_server
from paceline.weights.model_config import canonical
from paceline.weights.transport import TransportSettings, make_transport
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.folders import SavedCheckpoint, checkpoints_of, saved_checkpoint
from paceline_trainer.client import TrainerLedger
from paceline_trainer.gauges import TrainerGauges, peak_of, shape_of
from paceline_trainer.liveness import TrainerLiveness
from paceline_trainer.phase_clock import PhaseClock, report_loading
from paceline_trainer.ranks.distributed import Noticeboard, RankGroup
from paceline_trainer.ranks.laggard import RankPhases
from paceline_trainer.ranks.rank_info import RankInfo
from paceline_trainer.servicer import StatusServicer, TrainerReport
from paceline_trainer.step.average import WeightAverage
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_reference, open_policy
from paceline_trainer.step.mismatch.comparison import mismatch_of
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import WeightHistory
from paceline_trainer.traces import StepTraces
from paceline_trainer.trainer import Trainer, TrainingBackend
from paceline_trainer.weights.policy_server import PolicyServer, ServingBackend
from paceline_trainer.weights.publish import Publisher, snapshotter_of
from paceline_trainer.weights.seeder import WeightSeeder
from paceline_trainer.work_thread import WorkThread

EXIT_INVALID = 2
EXIT_FENCED = 4
ORPHAN_POLL_S = 1.0
STOP_POLL_S = 1.0
GAUGES_INTERVAL_S = 1.0
log = Log("service")


class TrainerService(Service):
    """Reads the job from experience, builds the trainer, or what serves weights, and runs it."""

    def __init__(self, *, chassis: Chassis, options: TrainerOptions, rank_info: RankInfo) -> None:
        self._chassis = chassis
        self._options = options
        self._rank_info = rank_info
        self._settings = chassis.settings
        self._clock = PhaseClock()
        self._config_json = ""  # of the model that was loaded
        self._channel = connect_as(chassis.settings, chassis.settings.experience)
        self._roster = RosterStub(self._channel)
        self._ledger = TrainerLedger(
            experience=ExperienceStub(self._channel),
            roster=self._roster,
            jobs=JobsStub(self._channel),
            job_id=chassis.settings.job_id,
            incarnation=options.incarnation,
        )
        self._weights = make_transport(
            options.weights_transport,
            TransportSettings(
                host=chassis.settings.host,
                port=options.weights_port,
                advertise_host=chassis.address.rsplit(":", 1)[0],
                metrics=chassis.metrics,
                tls=chassis.settings.tls,
                bytes_per_s=options.weights_bytes_per_s,
                keep_streaming=True,
            ),
        )
        self._endpoint = ""
        self._compute = WorkThread(ThreadPoolExecutor(1, thread_name_prefix="compute"))
        self._group: RankGroup | None = None
        self._board: Noticeboard | None = None
        self._phases: RankPhases | None = None
        self._publisher: Publisher | WeightSeeder | None = None
        self._trainer: Trainer | PolicyServer | None = None
        self._work: asyncio.Task[None] | None = None
        self._membership: Membership | None = None
        self._background: list[asyncio.Task[None]] = []
        self.exit_code = 0

    async def start(self) -> None:
        """Watch the parent process, serve weights (first rank of a node) and calls (rank 0)."""
        self._background.append(asyncio.create_task(self._watch_parent(), name="parent"))
        liveness = TrainerLiveness(clock=self._clock, trainer=lambda: self._trainer)
        liveness.register(self._chassis.health.progress)
        if self._rank_info.seeds:
            self._endpoint = await self._weights.start()
        if self._rank_info.first:
            servicer = StatusServicer(self._status)
            add_TrainerServicer_to_server(servicer, self._chassis.server)
            self._membership = Membership(
                roster=self._roster,
                report=self._report,
                progress=self._weights.progress,
                usage=self._chassis.usage.totals,
            )
            membership = asyncio.create_task(self._membership.run(), name="membership")
            self._background.append(membership)

    async def run(self) -> None:
        """Train; a signal cancels only this wait, see `drain`."""
        self._work = asyncio.create_task(self._train(), name="train")
        await asyncio.shield(self._work)

    async def drain(self) -> None:
        """Finish, commit and checkpoint the current step, on all ranks."""
        await self._request_stop()
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
        """Leave the roster and the process group."""
        for task in self._background:
            task.cancel()
        if self._membership is not None:
            await self._membership.leave()
        await self._weights.close()
        if self._group is not None:
            await self._compute.run(self._group.close)
        self._compute.close()
        await self._channel.close()

    async def _train(self) -> None:
        try:
            job = await self._ledger.job()
            spec = job_of(job)
            # Those of a job that was accepted before they had to be listed.
            unlisted = AllowedTargets.of(job.status.unlisted)
            if unlisted.targets:
                log.warning("functions that are not listed are called", functions=unlisted)
            allowed = self._settings.plugins.targets | unlisted
            await self._meet()
            if spec.trains:
                engine = await self._compute.run(self._build, spec, allowed)
                self._trainer = self._make(engine, spec)
            else:
                self._trainer = self._serving(await self._compute.run(self._copied, spec), spec)
            self._background.append(asyncio.create_task(self._watch_stop(), name="stop broadcast"))
            await self._trainer.run()
        except FencedError as error:
            log.warning("fenced: a newer incarnation runs", error=error)
            self.exit_code = EXIT_FENCED
        except InvalidError as error:
            log.error("job cannot be trained", error=error)
            self.exit_code = EXIT_INVALID
            await self._fail_job(error)
        except Exception as error:  # the supervisor boundary of this rank
            await self._report_failure(error)
            raise

    async def _meet(self) -> None:
        """Reach the other ranks, and show them what this one is at."""
        board = self._board = await asyncio.to_thread(Noticeboard, self._rank_info)
        phases = self._phases = RankPhases(board, self._rank_info, report=self._clock.report)
        showing = asyncio.create_task(phases.run(lambda: self._compute.ident), name="phases")
        self._background.append(showing)

    async def _report_failure(self, error: Exception) -> None:
        """Report the cause before the other ranks report that their collectives have failed."""
        reason = f"{describe(error)} (rank {self._rank_info.rank})"
        log.error("training failed", reason=reason)
        try:
            await self._ledger.report_failure(reason)
        except PacelineError as report_error:
            log.warning("failure not reported", error=report_error)

    async def _fail_job(self, error: InvalidError) -> None:
        """Fail the job in the ledger, as torchrun turns every exit code into 1."""
        if not self._rank_info.first:
            return
        try:
            await self._ledger.fail(error.message)
        except PacelineError as report_error:
            log.warning("job not failed", error=report_error)

    def _build(self, spec: JobSpec, allowed: AllowedTargets) -> TrainingBackend:
        """Build everything that computes, in the compute thread."""
        trainer = spec.trainer
        objective = load_objective(trainer.objective, trainer.hooks, allowed=allowed)
        model, policy, group = self._opened(spec)
        optimizer = Optimizer(policy, trainer.optimizer, total_steps=spec.stop.steps)
        reference = None
        if "reference" in objective.needs:
            reference = policy  # without its adapters
            if trainer.lora is None:
                phases = self._clock.report
                phases.enter(Phase.LOADING_MODEL)
                reference = load_reference(model, group, dtype=trainer.dtype, report=phases)
        snapshotter = snapshotter_of(spec, policy, group)
        mismatch = mismatch_of(
            spec,
            policy,
            group,
            snapshots="snapshots" in objective.needs,
            served=snapshotter.published_as or (),
        )
        average = None
        if "weight_average" in objective.needs:
            options = objective.proximal.options
            average = WeightAverage(policy, beta=options.beta, reset_below=options.reset_below)
        learner = Learner(
            policy=policy,
            optimizer=optimizer,
            objective=objective,
            group=group,
            budget=trainer.tokens_per_micro_batch,
            mini_batches=trainer.mini_batches,
            mismatch=mismatch,
            reference=reference,
            average=average,
        )
        checkpoints = Checkpoints(
            checkpoints_of(self._base, self._settings.job_id),
            group=group,
            keep=trainer.checkpoint.keep,
            incarnation=self._options.incarnation,
        )
        return TrainingBackend(
            policy, optimizer, learner, checkpoints, snapshotter, mismatch, group
        )

    def _copied(self, spec: JobSpec) -> ServingBackend:
        """Build what publishes weights that nobody trains, in the compute thread."""
        _, policy, group = self._opened(spec)
        return ServingBackend(policy, snapshotter_of(spec, policy, group), group)

    def _opened(self, spec: JobSpec) -> tuple[str, PolicyModel, RankGroup]:
        """The folder of the model, the model on its devices, and all ranks."""
        torch.manual_seed(spec.tasks.seed)
        trainer, phases = spec.trainer, self._clock.report
        models = ModelResolver(self._settings.models, run_dir=self._settings.run_dir)
        phases.enter(Phase.DOWNLOADING_MODEL)
        model = str(models.folder(spec.model, arrived=phases.reached))
        self._config_json = canonical(Path(model) / "config.json")
        phases.enter(Phase.LOADING_MODEL)
        policy = open_policy(
            model,
            gradient_checkpointing=trainer.gradient_checkpointing,
            lora=trainer.lora,
            report=phases,
        )
        torch.set_num_threads(self._threads(trainer.threads, policy))
        group = self._group = RankGroup(self._rank_info)
        report_loading(policy, self._rank_info.world, phases)
        shard(policy, group, dtype=trainer.dtype)
        return model, policy, group

    @property
    def _base(self) -> str:
        """The storage or run directory in which checkpoints are."""
        return str(self._settings.storage or self._settings.run_dir)

    def _threads(self, wanted: int | Literal["auto"], policy: PolicyModel) -> int:
        info = self._rank_info
        hidden = getattr(policy.config.get_text_config(), "hidden_size", 0)
        return threads_for(wanted, hidden=hidden, processes=info.world // info.nodes)

    def _make(self, engine: TrainingBackend, spec: JobSpec) -> Trainer:
        self._publisher = self._make_publisher(history=engine.mismatch.history)
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
                rank=self._rank_info.rank,
            ),
            gauges=self._make_gauges(engine, spec),
            # Waits are counted once per job, on rank 0.
            usage=self._chassis.usage if self._rank_info.first else None,
        )

    def _serving(self, backend: ServingBackend, spec: JobSpec) -> PolicyServer:
        self._publisher = self._make_publisher(fixed=True)

        def checkpoint(fork: ForkSpec) -> SavedCheckpoint:
            assert isinstance(fork.step, int)
            job_id = self._settings.job_id
            return saved_checkpoint(self._base, job_id, step=fork.step, digest=fork.digest)

        return PolicyServer(
            backend=backend,
            checkpoint=checkpoint,
            fork=spec.fork,
            ledger=self._ledger,
            publisher=self._publisher,
            compute=self._compute,
            clock=self._clock,
        )

    def _make_gauges(self, engine: TrainingBackend, spec: JobSpec) -> TrainerGauges:
        policy, device = engine.policy, engine.group.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        config = policy.config.get_text_config()
        gauges = TrainerGauges(
            self._chassis.metrics,
            job_id=self._settings.job_id,
            seconds=self._clock.elapsed,
            shape=shape_of(config, parameters=policy.num_parameters, tied=bool(policy.tied)),
            peak=peak_of(name, spec.trainer.dtype),
        )
        self._chassis.usage.measure_seconds(gauges.busy_s)
        show = asyncio.create_task(_every(GAUGES_INTERVAL_S, gauges.show), name="gauges")
        self._background.append(show)
        return gauges

    def _make_publisher(
        self, *, fixed: bool = False, history: WeightHistory | None = None
    ) -> Publisher | WeightSeeder | None:
        """`fixed`: a header names no incarnation, so that those of all are the same."""
        rank_info = self._rank_info
        if rank_info.first:
            if history is not None:
                self._weights.reuse(history.num_served)
            return Publisher(
                ledger=self._ledger,
                transport=self._weights,
                endpoint=self._endpoint,
                incarnation=0 if fixed else self._options.incarnation,
                parts=rank_info.nodes,
                config_json=self._config_json,
                history=history,
            )
        if rank_info.seeds and rank_info.nodes > 1:
            return WeightSeeder(
                ledger=self._ledger,
                transport=self._weights,
                endpoint=self._endpoint,
                part=rank_info.node,
                parts=rank_info.nodes,
            )
        return None

    async def _watch_parent(self) -> None:
        """Exit at once if torchrun has died: other ranks exit too, so collectives would hang."""
        while not self._rank_info.orphaned:
            await asyncio.sleep(ORPHAN_POLL_S)
        log.error("torchrun has died", rank=self._rank_info.rank)
        os._exit(1)

    async def _request_stop(self) -> None:
        """Tell the other ranks to stop, unless training has ended on all of them."""
        ended = self._work is None or self._work.done()
        if self._board is None or ended:
            return
        try:
            await asyncio.to_thread(self._board.request_stop)
        except UnavailableError as error:
            log.warning("other ranks not told to stop", error=error)

    async def _watch_stop(self) -> None:
        """Stop when another rank has to stop."""
        assert self._board is not None
        try:
            while not await asyncio.to_thread(self._board.stop_requested):
                await asyncio.sleep(STOP_POLL_S)
        except UnavailableError as error:
            log.warning("stop requests cannot be read", error=error)
            return
        self._chassis.stop()

    def _report(self) -> Worker:
        seconds = self._clock.elapsed()
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
            phases=((self._phases or self._clock.report).now,),
        )

    def _status(self) -> TrainerReport:
        return TrainerReport(
            job_id=self._settings.job_id,
            incarnation=self._options.incarnation,
            step=0 if self._trainer is None else self._trainer.step,
            published=None if self._publisher is None else self._publisher.published,
            phase=self._clock.phase,
            seconds=self._clock.seconds,
        )


async def _every(seconds: float, work: Callable[[], None]) -> None:
    while True:
        work()
        await asyncio.sleep(seconds)
