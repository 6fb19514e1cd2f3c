"""The training loop, and what its steps are made of."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from paceline.config.job import TrainerSpec
from paceline.errors import FencedError, InvalidError, StateError
from paceline.logs import Log
from paceline.types import PolicyVersion
from paceline.usage import Usage, nowhere
from paceline_trainer.checkpoint import Checkpoints, Found
from paceline_trainer.client import Ledger
from paceline_trainer.distributed import Group
from paceline_trainer.gauges import Gauges
from paceline_trainer.learner import Learner
from paceline_trainer.mismatch import Mismatch
from paceline_trainer.model import Policy
from paceline_trainer.optimizer import Optimizer
from paceline_trainer.publish import Copier, Publisher
from paceline_trainer.seed import Seed
from paceline_trainer.take import Share
from paceline_trainer.traces import StepTraces

POLL_S = 0.5
MOST_TOLD = 4  # damaged files in a reason
# Ranks may learn of different reasons to end; the highest one counts for all.
REASONS = ("", "finished", "paused", "cancelled", "signal")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
log = Log("trainer")


@dataclass(slots=True)
class Clock:
    """Seconds by phase since the start, and the phase now."""

    phase: str = "loading"
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    ended: dict[str, int] = field(default_factory=dict[str, int])  # how often each phase was over
    _started: float | None = None  # the present phase

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Count the time of a block."""
        before, self.phase = self.phase, phase
        self._started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = self.so_far()
            self.ended[phase] = self.ended.get(phase, 0) + 1
            self.phase, self._started = before, None

    def so_far(self) -> dict[str, float]:
        """Seconds by phase, with those that the present one has lasted."""
        if self._started is None:
            return dict(self.seconds)
        took = time.perf_counter() - self._started
        return {**self.seconds, self.phase: self.seconds.get(self.phase, 0.0) + took}


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that computes; used by one thread only, in the same order on every rank."""

    policy: Policy
    optimizer: Optimizer
    learner: Learner
    checkpoints: Checkpoints
    copier: Copier
    mismatch: Mismatch
    group: Group


class Trainer:
    """One rank. Only rank 0 speaks for all to the ledger; the first of each node serves weights."""

    def __init__(
        self,
        *,
        engine: Engine,
        ledger: Ledger,
        publisher: Publisher | Seed | None,
        compute: ThreadPoolExecutor,
        spec: TrainerSpec,
        clock: Clock,
        traces: StepTraces | None = None,
        gauges: Gauges | None = None,
        usage: Usage | None = None,
    ) -> None:
        self._gauges = gauges
        self._waits_on = nowhere if usage is None else usage.wait
        self._engine = engine
        self._ledger = ledger
        self._publisher = publisher
        self._compute = compute
        self._spec = spec
        self._traces = traces or StepTraces()
        self._place = engine.group.place
        self._stopping = asyncio.Event()
        self._next: asyncio.Task[Share] | None = None
        self._publication: asyncio.Task[PolicyVersion | None] | None = None
        self._parent = -1
        self._saved = 0
        self._copied = -1
        self._reported: dict[str, float] = {}
        self.clock = clock
        self.step = 0
        self.tokens = 0.0
        self.computing = False  # in the thread that computes
        self.stop_reason = ""

    def stop(self) -> None:
        """Finish the step under way, checkpoint, end."""
        self._stopping.set()

    async def run(self) -> None:
        """Train until the ledger says that it is enough."""
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
            await self._let_go()

    async def resume(self) -> None:
        """Load the newest checkpoint that is sound and take the ledger back to it."""
        checkpoints = self._engine.checkpoints
        known = (await self._ledger.job()).status.step if self._place.first else 0
        found = await self._run(checkpoints.find, most=known)
        step = found.step
        if self._place.first:
            for problem in found.damaged:
                log.error("a checkpoint is damaged", problem=problem, goes_on_from=step)
            if self._gauges is not None:
                self._gauges.damaged(len(found.damaged))
            step, self._parent = await self._rewind(found)
            await self._run(checkpoints.discard_after, step)
        self.step = self._saved = await self._run(self._engine.group.from_first, step)
        if self.step:
            engine = self._engine
            await self._run(checkpoints.load, self.step, engine.policy, engine.optimizer)
        log.info("starts", step=self.step, rank=self._place.rank, parent=self._parent)

    async def _rewind(self, found: Found) -> tuple[int, int]:
        """The ledger's step and newest version.

        Raises:
            InvalidError: only damaged checkpoints fit the ledger.
        """
        damage = "; ".join(found.damaged[:MOST_TOLD])
        if len(found.damaged) > MOST_TOLD:
            damage += f"; and {len(found.damaged) - MOST_TOLD} more"
        reason = f"goes on from step {found.step}: {damage}" if damage else ""
        try:
            return await self._ledger.rewind(found.step, reason=reason)
        except FencedError:
            raise
        except StateError as error:
            if not damage:
                raise
            raise InvalidError(f"no sound checkpoint is left ({error}): {damage}") from error

    async def take(self) -> Share | None:
        """This rank's share of the next batch; None when all ranks are to end."""
        since = self._traces.now()
        with self.clock.during("waiting"):
            self._next = self._next or self._ask()
            with self._waits_on("experience"):
                share = await self._until_stopped(self._next)
            self._next = None
            reason = "signal" if share is None else share.stop
            code = REASONS.index(reason) if reason in REASONS else REASONS.index("finished")
            codes = await self._run(self._engine.group.gather, [float(code)])
        self.stop_reason = REASONS[int(codes.max())]
        if self.stop_reason or share is None:
            return None
        self._traces.begin(share, since)
        return share

    async def learn(self, share: Share) -> dict[str, float]:
        """One optimiser step; every rank returns when all have done it."""
        newest = self._publisher.published if self._publisher is not None else None
        version, step = (newest.version, newest.step) if newest is not None else (-1, -1)
        with self.clock.during("stepping"), self._traces.stage("train.step"):
            await self._run(self._engine.mismatch.published, version, step)
            metrics = await self._run(self._engine.learner.step, share, self._traces.stage)
        self.step = share.step + 1
        self.tokens += metrics["tokens"]
        if self._gauges is not None:
            self._gauges.stepped(share, metrics, first=self._place.first)
        return metrics

    async def commit(self, share: Share, metrics: dict[str, float]) -> None:
        """Tell the ledger, and ask for the next batch while other things are done."""
        if self._place.first:
            told = metrics | self._seconds()
            # JSON has no infinity.
            sound = {name: value for name, value in told.items() if math.isfinite(value)}
            with self._traces.stage("train.commit"), self._waits_on("experience"):
                stop = await self._ledger.commit(share.step, share.batch_id, sound)
            log.info("step", step=self.step, loss=metrics["loss"], stop=stop)
        self._traces.end()
        self._next = self._ask()

    async def checkpoint(self) -> None:
        """Make everything up to this step durable."""
        engine = self._engine
        with self.clock.during("checkpointing"):
            path = await self._run(
                engine.checkpoints.save, self.step, engine.policy, engine.optimizer
            )
            self._saved = self.step
            if self._place.first:
                kept = await self._run(engine.checkpoints.kept, self.step)
                try:
                    with self._waits_on("experience"):
                        await self._ledger.checkpointed(self.step, str(path), kept=kept)
                except FencedError:
                    # A newer incarnation goes its own way from an older step.
                    await self._run(engine.checkpoints.discard, self.step)
                    raise

    async def publish(self) -> None:
        """Copy the weights; numbered and served meanwhile, and while the next batch is awaited."""
        with self.clock.during("publishing"):
            await self._published()
            snapshot = await self._run(self._engine.copier.begin, self.step)
            if self._publisher is not None:
                work = self._publisher.publish(snapshot, parent=self._parent)
                work = self._traces.published(self.step, work)
                self._publication = asyncio.create_task(work, name="publish")
            await self._run(self._engine.copier.gather, snapshot)
            await self._run(self._engine.mismatch.past.keep, self.step)
            self._copied = self.step

    async def finish(self) -> None:
        """Leave nothing undone that the reason to end asks for."""
        log.info("ends", step=self.step, reason=self.stop_reason)
        if self.stop_reason != "cancelled" and self._saved != self.step:
            await self.checkpoint()
        if self.stop_reason == "finished" and self._copied != self.step:
            await self.publish()
        await self._published()
        self.clock.phase = "finished"
        while self._place.first and self.stop_reason == "finished" and not self._stopping.is_set():
            if (await self._ledger.job()).status.state.terminal:
                return
            await asyncio.sleep(POLL_S)

    async def _let_go(self) -> None:
        """End what still runs beside the loop; how it ends no longer matters."""
        left: list[asyncio.Task[Any]] = []
        if self._next is not None:
            left.append(self._next)
        if self._publication is not None:
            left.append(self._publication)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _published(self) -> None:
        """Wait for the publication under way, so that a refused one ends this incarnation."""
        publication, self._publication = self._publication, None
        if publication is None:
            return
        if not self._place.first:
            publication.cancel()  # rank 0 waits for nobody's seed
            return
        with self._waits_on("weights"):
            version = await publication
        assert version is not None
        self._parent = version.version

    def _ask(self) -> asyncio.Task[Share]:
        work = self._ledger.take(self.step, rank=self._place.rank, world=self._place.world)
        task = asyncio.create_task(work, name="take")
        task.add_done_callback(self._traces.arrived)
        return task

    async def _until_stopped(self, take: asyncio.Task[Share]) -> Share | None:
        """The share; None if a signal comes first.

        A publication that fails meanwhile ends this incarnation: the batch may wait for its tokens.
        """
        stop = asyncio.create_task(self._stopping.wait(), name="stop")
        publication = self._publication if self._place.first else None
        left: set[asyncio.Task[Any]] = {take, stop}
        if publication is not None:
            left.add(publication)
        try:
            while not (take.done() or stop.done()):
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if publication is not None and publication in done:
                    publication.result()
        finally:
            stop.cancel()
        if take.done() and not self._stopping.is_set():
            return await take
        take.cancel()
        return None

    async def _run(
        self,
        work: Callable[Arguments, Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        loop = asyncio.get_running_loop()
        self.computing = True
        try:
            return await loop.run_in_executor(self._compute, lambda: work(*args, **kwargs))
        finally:
            self.computing = False

    def _seconds(self) -> dict[str, float]:
        """Seconds by phase since the last commit."""
        names = {
            "waiting": "wait_s",
            "stepping": "step_s",
            "checkpointing": "checkpoint_s",
            "publishing": "publish_s",
        }
        now = {name: self.clock.seconds.get(phase, 0.0) for phase, name in names.items()}
        since = {name: value - self._reported.get(name, 0.0) for name, value in now.items()}
        self._reported = now
        return since
