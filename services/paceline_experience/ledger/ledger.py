"""The ledger of one job: a thin front over leases, groups, batches, evals and completion."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.config.named import own_ledger_parts
from paceline.config.service import ExperienceOptions
from paceline.enums import EpisodeOutcome, GiveBackReason, StopReason
from paceline.platform.progress import LedgerProgress
from paceline.platform.telemetry.tracing import Tracer
from paceline.types import EpisodeProgress, PolicyVersion
from paceline_experience.ledger.advantages.estimator import Estimator
from paceline_experience.ledger.batches import Batches, fence
from paceline_experience.ledger.checkpoints import KeptCheckpoints
from paceline_experience.ledger.context import Hooks, LedgerContext, LedgerJob
from paceline_experience.ledger.counts import totals
from paceline_experience.ledger.evaluation.evals import Evals
from paceline_experience.ledger.generation.modes import EpisodeKey
from paceline_experience.ledger.generation.parts import generation_parts
from paceline_experience.ledger.generation.plan import generation_plan
from paceline_experience.ledger.generation.submission import Submitted
from paceline_experience.ledger.groups import Groups
from paceline_experience.ledger.job_completion import JobCompletion
from paceline_experience.ledger.leases import Demand, Leases
from paceline_experience.ledger.lifecycle.agreement import Agreement
from paceline_experience.ledger.lifecycle.pauses import Pauses
from paceline_experience.ledger.lifecycle.versions import Versions
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.ledger.own.parts import OwnParts
from paceline_experience.ledger.records import Publication, make_record
from paceline_experience.ledger.replay.imports import Imports
from paceline_experience.ledger.replay.stage import replay_stage
from paceline_experience.ledger.shares import BatchShare
from paceline_experience.ledger.sources import Sources
from paceline_experience.ledger.stored.listing import EpisodeListing
from paceline_experience.ledger.trajectories import Trajectories
from paceline_experience.ledger.verification import VerificationReport, verify
from paceline_experience.store.clock import Clock
from paceline_experience.store.payloads import PayloadStore
from paceline_experience.store.store import Store
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.quotas import JobLimits

__all__ = [
    "BatchShare",
    "Demand",
    "EpisodeKey",
    "Hooks",
    "JobLedger",
    "LedgerJob",
    "VerificationReport",
]


class JobLedger:
    """One job. All state is in Redis and rebuilt by `open`; one object per job and process."""

    def __init__(
        self,
        *,
        store: Store,
        job: LedgerJob,
        sources: Sources,
        payloads: PayloadStore,
        hooks: Hooks,
        options: ExperienceOptions,
        limits: JobLimits,
        clock: Clock,
        watermarks: Watermarks,
        tracer: Tracer,
        meter: JobMeter,
        own: OwnParts,
    ) -> None:
        tasks, eval_tasks = sources.train, sources.evals
        plan = generation_plan(job.spec, own_ledger_parts(job.spec))
        parts = generation_parts(plan, len(tasks), own)
        core = LedgerContext(
            store=store,
            job=job,
            clock=clock,
            cursor=parts.cursor,
            limits=limits,
            watermarks=watermarks,
            tracer=tracer,
            meter=meter,
            learners=parts.learners,
        )
        parts.listen(core.work.fire)
        estimator = Estimator(core, own)
        groups = Groups(
            core=core,
            payloads=payloads,
            compress_over_bytes=options.compress_over_bytes,
            observe=estimator.observes,
            own=own,
            allocation=parts.allocation,
            replay=replay_stage(core, own),
        )
        self._core, self._groups, self._payloads = core, groups, payloads
        self._parts, self._own = parts, own
        self._hooks, self._rows_reported = hooks, -1
        self._kept = KeptCheckpoints(core, hooks)
        self.leases = Leases(core=core, groups=groups, tasks=tasks, eval_tasks=eval_tasks)
        self.batches = Batches(core=core, groups=groups, payloads=payloads, estimator=estimator)
        self.evals = Evals(core=core, groups=groups, eval_tasks=eval_tasks)
        self.pauses = Pauses(core=core, leases=self.leases, evals=self.evals)
        self.trajectories = Trajectories(core=core, payloads=payloads)
        self.imports = Imports(core=core, groups=groups, tasks=tasks)
        self.episodes = EpisodeListing(core=core, payloads=payloads, samples=groups.samples)
        self.completion = JobCompletion(
            core=core,
            groups=groups,
            leases=self.leases,
            batches=self.batches,
            evals=self.evals,
            hooks=hooks,
        )
        self.agreement = Agreement(core)
        self.versions = Versions(core=core, evals=self.evals, fail=self.completion.fail)

    async def open(self) -> None:
        """Load what Redis holds; leases get their full time again."""
        self._core.on_rollback(self._recover_from_rollback)
        async with self._core.transaction():
            await self._recover()

    async def _recover(self) -> None:
        """Inside a transaction: clean up what a crash left behind."""
        listed = await self._core.listed_payloads()
        await self._groups.recover(listed)
        await self._groups.settle(list(self._core.state.open))
        granted = self._core.watermarks.highest("incarnation")
        if granted > self._core.state.meta.incarnation:  # the store has lost the grant
            await self._core.note(incarnation=granted)

    async def _recover_from_rollback(self) -> None:
        """The store was rolled back: what is cached outside the state goes back with it."""
        for each in (self.batches, self._groups.aborts, self.leases.mode):
            each.forget()
        await self._recover()
        await self._hooks.store_rolled_back()

    async def record(self) -> None:
        """Call the hooks for new rows in the history, until that has succeeded once."""
        written = self._core.rows_written
        if written != self._rows_reported:
            await self._hooks.recorded()
            self._rows_reported = written
        await self._kept.report()

    def recalled(self, worker_id: str) -> list[EpisodeKey]:
        """Episodes that a worker is to give back with their progress, or to abort (no reason)."""
        return [*self.leases.mode.recalled(worker_id), *self._groups.aborts.pop(worker_id)]

    def held(self, worker_id: str) -> int:
        """Number of episodes of this job that a worker has on lease."""
        return self._core.state.held[worker_id]

    def holders(self) -> list[str]:
        """Workers that have episodes of this job on lease."""
        return [worker_id for worker_id, count in self._core.state.held.items() if count > 0]

    async def refresh(self) -> None:
        """Reload the state if it is unknown what was written last."""
        async with self._core.transaction():
            pass

    def serve(self, versions: Iterable[int]) -> None:
        """Rollout workers sample with these versions; admission waits for weights in transfer."""
        served = frozenset(version for version in versions if version >= 0)
        self.leases.serve(served)
        self._core.traces.served(served)

    def close(self, *, over: bool = False) -> None:
        """This process is done with the job; `over`: so is everybody, and its data are let go."""
        for each in (self._parts, self._groups, self.batches, self._core.traces, self.imports):
            each.close()
        for part in (self.leases, self.imports) if over else ():
            part.let_go()

    def wakeup(self) -> asyncio.Event:
        """Set when there may be episodes to lease: taken before `lease`, awaited after it."""
        return self._core.work.event()

    async def renew(
        self, *, worker_id: str, keys: Sequence[EpisodeKey], progress: Sequence[EpisodeProgress]
    ) -> list[EpisodeKey]:
        """Extend leases and store progress; returns what the worker must abort."""
        del worker_id  # the attempt says who holds the lease
        self.evals.observe(progress)
        return await self.leases.renew(keys=keys, progress=progress)

    async def give_back(self, *, worker_id: str, keys: Sequence[EpisodeKey]) -> None:
        """Return episodes, for the reason that each key gives; one may end the job."""
        del worker_id
        await self.leases.give_back(keys)
        denied = [key.detail for key in keys if key.reason is GiveBackReason.DENIED]
        if denied and not self._core.state.stop:
            await self.completion.fail(denied[0])
        await self.completion.check()

    async def submit(self, trajectories: Sequence[Submitted]) -> list[EpisodeOutcome]:
        """Store trajectories; returns the outcome of each."""
        outcomes = await self._groups.submit(trajectories)
        if self.evals.idle:  # workers are held as long as the run is open
            await self.evals.sweep()
        self.leases.mode.recall()
        return outcomes

    async def grant_incarnation(self) -> int:
        """Number the next start of the trainer; older incarnations are fenced from then on."""
        async with self._core.transaction() as state:
            granted = self._core.watermarks.highest("incarnation")
            number = max(state.meta.incarnation, granted) + 1
            await self._core.note(incarnation=number)
            await self.pauses.admit_trainer()
            await self._core.watermarks.reach("incarnation", number)
        self._core.ready.fire()
        return number

    async def report_failure(self, *, incarnation: int, reason: str) -> tuple[int, str]:
        """An incarnation has failed (0: the newest); returns the count and reason of `Failures`."""
        async with self._core.transaction() as state:
            before, newest = state.meta.failures, state.meta.incarnation
            failed = incarnation or newest
            after = before.record(failed, newest=newest, step=state.step, reason=reason)
            if after != before:
                await self._core.note(failures=after)
        return after.count, after.reason

    async def rewind(self, *, incarnation: int, step: int) -> tuple[int, int]:
        """Start from the checkpoint of `step`; returns that step and the newest version."""
        found = await self.batches.rewind(incarnation=incarnation, step=step)
        await self._kept.report()
        return found

    async def take(self, *, incarnation: int, step: int, rank: int, world: int) -> BatchShare:
        """This rank's share of the batch of `step`; waits until there is one."""
        share = await self.batches.take(incarnation=incarnation, step=step, rank=rank, world=world)
        await self.completion.trainer_informed(share.stop)
        return share

    async def commit(
        self, *, incarnation: int, step: int, batch_id: str, metrics: dict[str, Any]
    ) -> tuple[int, StopReason | None]:
        """Commit a trained step; returns the ledger's step and the stop reason, if any."""
        reported = self._core.reported(metrics)

        def describe(stats: Mapping[str, Any], counts: Counter[str]) -> dict[str, Any]:
            version = self._core.state.version
            return {**reported, **stats, "version": version, **self._totals(counts)}

        done, values = await self.batches.commit(
            incarnation=incarnation, step=step, batch_id=batch_id, describe=describe
        )
        if values is not None:
            self._core.meter.row("train", values)
        await self.record()
        await self.completion.check()
        await self.completion.trainer_informed(self._core.state.stop)
        return done, self._core.state.stop

    async def commit_checkpoint(
        self, *, incarnation: int, step: int, path: str, kept: Sequence[int] = (), digest: str = ""
    ) -> tuple[int, ...]:
        """The checkpoint of `step` is durable (`Batches.commit_checkpoint`)."""
        stay = await self.batches.commit_checkpoint(
            incarnation=incarnation, step=step, path=path, kept=kept, digest=digest
        )
        await self._kept.report()
        return stay

    async def trim(self) -> None:
        """Delete trajectories that need not be kept any more."""
        async with self._core.transaction():
            await self.batches.trim(self._core.spec.experience.keep_trajectories)

    async def publish_version(
        self,
        *,
        incarnation: int,
        step: int,
        parent: int,
        num_bytes: int,
        digest: str = "",
        number: int = -1,
        above: int = -1,
    ) -> PolicyVersion:
        """Number a publication; repeating the call returns the same number.

        The digest is stored by the first call that has one. A trainer that was already given a
        number repeats it as `number`: if the store has lost the publication, it is restored under
        it. A new number is above `above`, the parent, and every number ever assigned.

        A job that trains nothing has one version, which every incarnation publishes again.

        Raises:
            StateError: the step is not trained, or another publication has this number.
            UnavailableError: the number could not be made durable; retry.
        """
        core = self._core
        async with core.transaction() as state:
            fence(state, incarnation)
            floor = max(above, parent, core.watermarks.highest("version"))
            told = (incarnation, step, parent, num_bytes, digest, floor, number)
            fixed = int(not core.spec.trains)
            answer = await core.change("publish_version", *told, fixed)
            published = make_record(Publication, answer)
            await core.watermarks.reach("version", published.version)
            state.versions[published.version] = published
            core.traces.published(published.version, step=step, incarnation=incarnation)
            if first := state.meta.started is None:
                await core.note(started=core.clock.now())
        if await self.pauses.published() or first:
            await self._hooks.running()
        await self.evals.on_publication(step)
        core.work.fire()
        return published.policy_version()

    async def begin(self) -> None:
        """Begin, or go on after a pause, with a policy that nobody publishes: an endpoint's.

        The ledger numbers a version for it, which stands for no weights. May be repeated.
        """
        async with self._core.transaction():
            await self.pauses.admit_trainer()
        await self.publish_version(incarnation=0, step=0, parent=-1, num_bytes=0)
        await self._hooks.running()

    async def sweep(self) -> None:
        """Handle expired leases, stragglers, evals and completion; call it every `sweep_s`."""
        await self._core.compare()
        await self.leases.expire()
        self.leases.mode.recall()
        await self.leases.release_stragglers(self.batches.waiting_s)
        await self.evals.sweep()
        await self.record()
        await self.completion.check()
        await self.completion.advance()
        demand = self.leases.demand()
        if demand.new or demand.queued or demand.eval_queued:  # some of it came without a signal
            self._core.work.fire()
        await self._core.save_clock()  # last, so that a full store does not stop the rest

    @property
    def counts(self) -> Counter[str]:
        """The ledger's counters, as of the last change."""
        return self._core.state.counts

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of all its trajectories in the store."""
        return self._groups.payload_bytes

    @property
    def incarnation(self) -> int:
        """The newest incarnation of the trainer; 0: none was started yet."""
        return self._core.state.meta.incarnation

    @property
    def stopping(self) -> bool:
        """Whether there will be no further batch."""
        return self._core.state.stop is not None

    @property
    def closed(self) -> bool:
        """Whether nothing more will be trained."""
        return self._core.state.closed

    def waiting_on(self) -> str:
        """The service that a trainer without a batch waits for; empty: no trainer waits."""
        if not self.batches.waiting:
            return ""
        load = self.leases.load()
        stalled = load.step < self._core.state.step and self.leases.headroom() == 0
        return "weights" if stalled and not load.open_episodes else "environment"

    async def verify(self) -> VerificationReport:
        """Recount everything and compare it with the counters."""
        return await verify(self._core, self._payloads)

    async def live(self) -> LedgerProgress:
        """Current counts, waits and rates, without asking Redis."""
        state, load = self._core.state, self.leases.load()
        last = state.batches.get(state.step - 1)
        return LedgerProgress(
            **self._totals(state.counts),
            step=state.step,
            version=state.version,
            stop=state.stop,
            open_groups=load.open_groups,
            accepted_groups=load.accepted_groups,
            ready_groups=len(state.ready),
            headroom_groups=self.leases.headroom(),
            group_size=self.leases.limits.group_size,
            payload_bytes=load.payload_bytes,
            waiting=self.batches.waiting,
            waiting_s=self.batches.waiting_s,
            reward_mean=last.stats.reward_mean if last else None,
            eval=self.evals.progress(),
            **self._groups.losses.failures(),
            back_off_s=self._groups.back_off.left_s,
            disagreement=self.agreement.words,
            unanswered=self._own.unanswered,
            **self.evals.standings(),
        )

    def _totals(self, counts: Counter[str]) -> dict[str, Any]:
        """What only grows; it also goes into every metric row."""
        return {**totals(counts), "trainer_wait_total_s": self.batches.waited_s}
