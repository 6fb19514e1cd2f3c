"""The training loop and its steps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.config.job import TrainerSpec
from paceline.enums import Phase
from paceline.errors import FencedError, InvalidError, PacelineError, StateError
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.usage import Usage, nowhere
from paceline.types import PolicyVersion
from paceline_trainer.checkpoints.checkpoint import Checkpoints, FoundCheckpoint, WrittenCheckpoint
from paceline_trainer.checkpoints.state import StagedCheckpoint
from paceline_trainer.client import TrainerLedger
from paceline_trainer.columns import Share
from paceline_trainer.gauges import TrainerGauges
from paceline_trainer.phase_clock import PhaseClock
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.mismatch.comparison import Mismatch
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import local_shards
from paceline_trainer.traces import StepTraces
from paceline_trainer.weights.publish import Publisher, Snapshotter, Source, WeightCopy
from paceline_trainer.weights.seeder import WeightSeeder
from paceline_trainer.work_thread import WorkThread

POLL_S = 0.5
MAX_REPORTED = 4  # damaged files in a reason
# Ranks may have different reasons to train no batch; the one with the highest index counts.
REASONS = ("", "withdrawn", "finished", "paused", "cancelled", "signal")
Result = TypeVar("Result")
log = Log("trainer")


@dataclass(frozen=True, slots=True)
class TrainingBackend:
    """Everything that computes; used by a single thread, in the same order on all ranks."""

    policy: PolicyModel
    optimizer: Optimizer
    learner: Learner
    checkpoints: Checkpoints
    snapshotter: Snapshotter
    mismatch: Mismatch
    group: RankGroup


async def _done(result: Result) -> Result:
    return result


class Trainer:
    """One rank. Only rank 0 reports to the ledger; the first rank of each node serves weights."""

    def __init__(
        self,
        *,
        engine: TrainingBackend,
        ledger: TrainerLedger,
        publisher: Publisher | WeightSeeder | None,
        compute: WorkThread,
        spec: TrainerSpec,
        clock: PhaseClock,
        traces: StepTraces | None = None,
        gauges: TrainerGauges | None = None,
        usage: Usage | None = None,
    ) -> None:
        self._gauges = gauges
        self._waits_on = nowhere if usage is None else usage.wait
        self._engine = engine
        self._ledger = ledger
        self._publisher = publisher
        self.compute = compute
        self._spec = spec
        self._traces = traces or StepTraces()
        self._rank_info = engine.group.rank_info
        self._stopping = asyncio.Event()
        self._next_batch: asyncio.Task[Share] | None = None
        self._publication: asyncio.Task[PolicyVersion | None] | None = None
        self._copier = ThreadPoolExecutor(1, "copier", torch.set_num_threads, (1,))
        self._saving: asyncio.Task[None] | None = None
        # Of checkpoints, whose storage may be slow.
        self.writer = WorkThread(ThreadPoolExecutor(1, "checkpoint", torch.set_num_threads, (1,)))
        self._parent = -1
        self._staged_step = 0
        self._checkpoint_step = 0
        self._snapshot_step = -1
        self.clock = clock
        self.step = 0
        self.tokens = 0.0
        self.stop_reason = ""

    def stop(self) -> None:
        """Finish the current step, checkpoint, and stop."""
        self._stopping.set()

    async def run(self) -> None:
        """Train until the ledger ends the job."""
        try:
            await self.resume()
            await self.publish()
            while (share := await self.take()) is not None:
                metrics = await self.learn(share)
                await self.commit(share, metrics)
                if self.step % self._spec.checkpoint.every == 0:
                    await self.checkpoint()
                if self.step % self._spec.publish_every == 0:
                    await self.publish()
            await self.finish()
        finally:
            await self._cancel_tasks()

    async def resume(self) -> None:
        """Load the newest intact checkpoint and rewind the ledger to it."""
        checkpoints = self._engine.checkpoints
        ledger_step, recorded = 0, None
        if self._rank_info.first:
            ledger_step = (await self._ledger.job()).status.step
            recorded = await self._ledger.checkpoints()
        found = await self.compute.run(checkpoints.find, max_step=ledger_step, recorded=recorded)
        step = found.step
        if self._rank_info.first:
            for problem in found.damaged:
                log.error("checkpoint damaged", problem=problem, resumes_from=step)
            if self._gauges is not None:
                self._gauges.damaged(len(found.damaged))
            step, self._parent = await self._rewind(found)
            await self.compute.run(checkpoints.discard_after, step)
        self.step = await self.compute.run(self._engine.group.from_first, step)
        self._checkpoint_step = self._staged_step = self.step
        if self.step:
            self.clock.report.enter(Phase.LOADING_CHECKPOINT, number=self.step)
            engine = self._engine
            state = engine.learner.state()
            load = partial(checkpoints.load, extras=self._extras())
            if not await self.compute.run(load, self.step, engine.policy, engine.optimizer, state):
                log.warning("the checkpoint has no state of slots", step=self.step)
                await self.compute.run(engine.learner.start_again)
        log.info("training starts", step=self.step, rank=self._rank_info.rank, parent=self._parent)

    async def _rewind(self, found: FoundCheckpoint) -> tuple[int, int]:
        """Rewind the ledger; returns its step and newest version.

        Raises:
            InvalidError: all checkpoints that the ledger could resume from are damaged.
        """
        damage = "; ".join(found.damaged[:MAX_REPORTED])
        if len(found.damaged) > MAX_REPORTED:
            damage += f"; and {len(found.damaged) - MAX_REPORTED} more"
        reason = f"resumes from step {found.step}: {damage}" if damage else ""
        try:
            return await self._ledger.rewind(found.step, reason=reason)
        except FencedError:
            raise
        except StateError as error:
            if not damage:
                raise
            raise InvalidError(f"no intact checkpoint is left ({error}): {damage}") from error

    async def take(self) -> Share | None:
        """Wait for this rank's share of the next batch; None if all ranks have to stop.

        Weights that no engine accepts are published again meanwhile.
        """
        since = self._traces.now()
        share, reason = await self._agreed()
        while reason == "withdrawn":
            await self._publish_again()
            share, reason = await self._agreed()
        self._next_batch = None
        self.stop_reason = reason
        if reason or share is None:
            return None
        self._traces.begin(share, since)
        return share

    async def _agreed(self) -> tuple[Share | None, str]:
        """This rank's share, and why all ranks train nothing now; empty: they do."""
        with self.clock.measure("waiting", self.step + 1):
            self._next_batch = self._next_batch or self._fetch_batch()
            with self._waits_on("experience"):
                share = await self._until_stopped(self._next_batch)
            self.clock.report.mark()  # and now it waits for the other ranks
            reason = "signal" if share is None else share.stop or ""
            if share is not None and share.publish_again:
                reason, self._next_batch = "withdrawn", None
            code = REASONS.index(reason) if reason in REASONS else REASONS.index("finished")
            codes = await self.compute.run(self._engine.group.gather, [float(code)])
        return share, REASONS[int(codes.max())]

    async def learn(self, share: Share) -> dict[str, float]:
        """Do one optimiser step; returns when all ranks have done it.

        Raises:
            InvalidError: the batch or its loss cannot be trained on; names the newest checkpoint.
        """
        newest = self._publisher.published if self._publisher is not None else None
        version, step = (newest.version, newest.step) if newest is not None else (-1, -1)
        with self.clock.measure("stepping", share.step + 1), self._traces.stage("train.step"):
            await self.compute.run(self._engine.mismatch.versions.published, version, step)
            try:
                metrics = await self.compute.run(self._engine.learner.step, share, self._stage)
            except InvalidError as error:
                raise InvalidError(f"{error.message}. {await self._newest()}") from error
        self.step = share.step + 1
        self.tokens += metrics["tokens"]
        if self._gauges is not None:
            self._gauges.stepped(share, metrics, first=self._rank_info.first)
        return metrics

    def _stage(self, name: str) -> AbstractContextManager[None]:
        """The span of a part of a step; a micro-batch is done when its gradients begin."""
        self.clock.report.mark()
        if name == "backward":
            self.clock.report.add()
        return self._traces.stage(name)

    async def commit(self, share: Share, metrics: dict[str, float]) -> None:
        """Commit the step to the ledger, and start fetching the next batch."""
        self.clock.report.enter(Phase.COMMITTING, number=self.step)
        if self._rank_info.first:
            values = metrics | self.clock.since_last()
            # JSON has no infinity and no NaN.
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            with self._traces.stage("train.commit"), self._waits_on("experience"):
                stop = await self._ledger.commit(
                    share.step,
                    share.batch_id,
                    finite,
                    mismatches=self._engine.mismatch.verdicts,
                )
            log.info("step committed", step=self.step, loss=metrics["loss"], stop=stop)
        self._traces.end()
        self._next_batch = self._fetch_batch()

    async def checkpoint(self) -> None:
        """Begin to write the state of this step, which is committed in the background.

        Only one is in the making: this waits for the one before, and fails if that has failed.
        """
        engine = self._engine
        with self.clock.measure("checkpointing", self.step):
            await self.checkpointed()
            staged = await self.compute.run(
                engine.checkpoints.stage,
                self.step,
                engine.policy,
                engine.optimizer,
                engine.learner.state(),
                self._extras(),
            )
        self._staged_step = self.step
        writing = self.writer.submit(engine.checkpoints.write, staged)
        if staged.in_place:
            engine.policy.written_by(writing)
        self._saving = asyncio.create_task(self._save(staged, writing), name="checkpoint")

    async def _save(self, staged: StagedCheckpoint, writing: Future[WrittenCheckpoint]) -> None:
        checkpoints = self._engine.checkpoints
        written = await asyncio.wrap_future(writing)
        self._checkpoint_step = staged.step
        if not self._rank_info.first:
            return
        kept = await self.writer.run(checkpoints.kept, staged.step)
        try:
            with self._waits_on("experience"):
                retained = await self._ledger.commit_checkpoint(
                    staged.step, written.path, kept=kept, digest=written.digest
                )
        except FencedError:
            # A newer incarnation has resumed from an older step.
            await self.writer.run(checkpoints.discard, staged.step)
            raise
        await self.writer.run(partial(checkpoints.clean_up, newest=staged.step, retained=retained))

    def _extras(self) -> dict[str, Tensor]:
        return {"canary": self._engine.snapshotter.canary_text}

    async def checkpointed(self) -> None:
        """Wait until the last checkpoint is written and committed; raises what went wrong."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _newest(self) -> str:
        """Where the newest checkpoint is, for the reason of a job that fails."""
        with suppress(PacelineError):
            await self.checkpointed()
        step = self._checkpoint_step
        if not step:
            return "There is no checkpoint yet"
        try:
            path = await self.writer.run(self._engine.checkpoints.path, step)
        except PacelineError as error:
            path = f"it cannot be found ({error.message})"
        return f"The newest checkpoint is of step {step}: {path}"

    async def publish(self) -> None:
        """Begin a copy of the weights, which is numbered and served in the background.

        It is made while the next step computes gradients, unless ranks have to gather it together.
        """
        with self.clock.measure("publishing", self.step):
            await self._await_publication()
            snapshotter, policy = self._engine.snapshotter, self._engine.policy
            if policy.whole:
                source, weights = snapshotter.source(), local_shards(policy)
                begun = None
                if snapshotter.in_place:  # before anything gives the policy other weights
                    begun = await self.compute.run(snapshotter.begin, self.step, source)
                described = Future[WeightCopy]()
                copying = self._copier.submit(
                    self._copy, self.step, source, weights, begun, described
                )
                policy.copied_by(copying)
                self._serve(asyncio.wrap_future(described))
            else:
                snapshot = await self.compute.run(snapshotter.begin, self.step)
                self._serve(_done(snapshot))
                await self.compute.run(snapshotter.gather, snapshot)
                await self.compute.run(self._engine.mismatch.history.copy, self.step)
            self._snapshot_step = self.step

    async def _publish_again(self) -> None:
        """Publish the weights anew, under another number, as all engines refuse the last version.

        Returns on no rank before the ledger knows: it would say the same again.
        """
        log.warning("no engine accepts the newest version: publishing again", step=self.step)
        await self.publish()
        if self._rank_info.first:
            await self._await_publication()
        await self.compute.run(self._engine.group.barrier)

    def _copy(
        self,
        step: int,
        source: Source,
        weights: Sequence[Tensor],
        begun: WeightCopy | None,
        described: Future[WeightCopy],
    ) -> None:
        """Copy the weights; whoever waits for `described` takes the tensors as they come."""
        try:
            self._engine.mismatch.history.copy(step, weights)
            snapshot = begun or self._engine.snapshotter.begin(step, source)
        except BaseException as error:
            described.set_exception(error)
            raise
        described.set_result(snapshot)
        self._engine.snapshotter.gather(snapshot)

    def _serve(self, snapshot: Awaitable[WeightCopy]) -> None:
        """Number and serve a copy in the background, if this rank does."""
        publisher = self._publisher
        if publisher is None:
            return

        async def publish() -> PolicyVersion | None:
            return await publisher.publish(await snapshot, parent=self._parent)

        work = self._traces.published(self.step, publish())
        self._publication = asyncio.create_task(work, name="publish")

    async def finish(self) -> None:
        """Checkpoint and publish the last step as far as the stop reason requires it."""
        log.info("training ends", step=self.step, reason=self.stop_reason)
        if self.stop_reason != "cancelled":
            if self._staged_step != self.step:
                await self.checkpoint()
            with self.clock.measure("checkpointing", self.step):
                await self.checkpointed()
        if self.stop_reason == "finished" and self._snapshot_step != self.step:
            await self.publish()
        await self._await_publication()
        self.clock.phase = "finished"
        self.clock.report.enter(Phase.FINISHED)
        while (
            self._rank_info.first and self.stop_reason == "finished" and not self._stopping.is_set()
        ):
            if (await self._ledger.job()).status.state.terminal:
                return
            await asyncio.sleep(POLL_S)

    async def _cancel_tasks(self) -> None:
        """Cancel background tasks; their results do not matter any more."""
        found = (self._next_batch, self._publication, self._saving)
        tasks: list[asyncio.Task[Any]] = [task for task in found if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _await_publication(self) -> None:
        """Wait for the current publication, so that a refused one ends this incarnation."""
        publication, self._publication = self._publication, None
        if publication is None:
            return
        if not self._rank_info.first:
            publication.cancel()  # rank 0 does not wait for seeders
            return
        with self._waits_on("weights"):
            version = await publication
        assert version is not None
        self._parent = version.version

    def _fetch_batch(self) -> asyncio.Task[Share]:
        work = self._ledger.take(self.step, rank=self._rank_info.rank, world=self._rank_info.world)
        task = asyncio.create_task(work, name="take")
        task.add_done_callback(self._traces.arrived)
        return task

    async def _until_stopped(self, take: asyncio.Task[Share]) -> Share | None:
        """Wait for the share; None if a signal comes first.

        A publication that fails meanwhile ends this incarnation, as the batch may need its tokens;
        so does a checkpoint that cannot be written.
        """
        stop = asyncio.create_task(self._stopping.wait(), name="stop")
        found = (self._publication if self._rank_info.first else None, self._saving)
        background = [task for task in found if task is not None]
        tasks: set[asyncio.Task[Any]] = {take, stop, *background}
        try:
            while not (take.done() or stop.done()):
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in background:
                    if task in done:
                        task.result()
        finally:
            stop.cancel()
        if take.done() and not self._stopping.is_set():
            return await take
        take.cancel()
        return None
