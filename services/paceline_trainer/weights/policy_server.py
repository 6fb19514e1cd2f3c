"""Serves the weights of a job that trains nothing: those of its model, or of a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.config.lifecycle.forks import ForkSpec
from paceline.enums import JobState, Phase
from paceline.errors import IntegrityError, InvalidError, NotFoundError
from paceline.platform.telemetry.logs import Log
from paceline_trainer.checkpoints.folders import SavedCheckpoint
from paceline_trainer.checkpoints.weights_only import load_weights
from paceline_trainer.client import TrainerLedger
from paceline_trainer.phase_clock import PhaseClock
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.weights.publish import Publisher, Snapshotter
from paceline_trainer.weights.seeder import WeightSeeder
from paceline_trainer.work_thread import WorkThread

POLL_S = 0.5
_ENDS = frozenset({JobState.PAUSING, JobState.PAUSED, JobState.CANCELLING})
log = Log("serving")


@dataclass(frozen=True, slots=True)
class ServingBackend:
    """A policy, and what copies it; used by a single thread, in the same order on all ranks."""

    policy: PolicyModel
    snapshotter: Snapshotter
    group: RankGroup


class PolicyServer:
    """One rank: publishes the weights once, lets go of the model and serves them to the end.

    Started again, it publishes the same version: weights, canary and header are the same, so its
    digest is, and the ledger refuses others.
    """

    writer: WorkThread | None = None  # nothing is written
    tokens = 0.0

    def __init__(
        self,
        *,
        backend: ServingBackend,
        checkpoint: Callable[[ForkSpec], SavedCheckpoint],
        fork: ForkSpec | None,
        ledger: TrainerLedger,
        publisher: Publisher | WeightSeeder | None,
        compute: WorkThread,
        clock: PhaseClock,
    ) -> None:
        """`checkpoint` finds the one that a job continues from, and `fork` names it."""
        self._backend: ServingBackend | None = backend
        self._checkpoint = checkpoint
        self._fork = fork
        self._ledger = ledger
        self._publisher = publisher
        self._clock = clock
        self._stopping = asyncio.Event()
        self.compute = compute
        self.step = 0

    def stop(self) -> None:
        """Serve no longer."""
        self._stopping.set()

    async def run(self) -> None:
        """Publish, and serve until the job is over or paused."""
        backend, self._backend = self._backend, None
        assert backend is not None
        if self._fork is not None:
            await self._load(backend, self._fork)
        with self._clock.measure("publishing", self.step):
            await self._publish(backend)
        del backend  # the copy that is served needs no model
        await self._serve()

    async def _load(self, backend: ServingBackend, fork: ForkSpec) -> None:
        """The weights of a checkpoint, whose files are compared with their digests.

        Raises:
            InvalidError: it is damaged, so that another start would find the same.
        """
        assert isinstance(fork.step, int)
        self._clock.report.enter(Phase.LOADING_CHECKPOINT, number=fork.step)
        try:
            saved = await self.compute.run(self._checkpoint, fork)
            if backend.group.rank_info.first:
                await self.compute.run(saved.verify)
        except (IntegrityError, NotFoundError) as error:
            raise InvalidError(f"fork.step: {error.message}") from error
        await self.compute.run(load_weights, saved, backend.policy)
        self.step = fork.step

    async def _publish(self, backend: ServingBackend) -> None:
        copy = await self.compute.run(backend.snapshotter.begin, self.step)
        publication = None
        if self._publisher is not None:
            publication = asyncio.create_task(self._publisher.publish(copy, parent=-1))
        await self.compute.run(backend.snapshotter.gather, copy)
        if publication is not None:
            await publication

    async def _serve(self) -> None:
        published = self._publisher.published if self._publisher is not None else None
        number = -1 if published is None else published.version
        self._clock.phase = "serving"
        self._clock.report.enter(Phase.SERVING, number=number)
        log.info("serving", step=self.step, version=number)
        while not self._stopping.is_set():
            state = (await self._ledger.job()).status.state
            if state.terminal or state in _ENDS:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), POLL_S)
