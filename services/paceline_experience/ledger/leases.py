"""Leases episodes to environment workers, renews the leases and requeues lost ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.enums import DropReason, GiveBackReason, Purpose
from paceline.errors import InvalidError, LimitError, plugin_boundary
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.plugins import TaskSource
from paceline.types import Assignment, EpisodeProgress, Task
from paceline.v1 import types_pb2 as pb
from paceline_experience.ledger.admission import (
    AdmissionLimits,
    AdmissionLoad,
    bound,
    headroom,
    serving_step,
)
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.generation.allocation import episode_starts, named_tasks
from paceline_experience.ledger.generation.lease_plan import LeasePlan
from paceline_experience.ledger.generation.modes import EpisodeKey, Mode
from paceline_experience.ledger.generation.submission import Report, Verdict
from paceline_experience.ledger.groups import Groups
from paceline_experience.ledger.sources import Sources
from paceline_experience.ledger.staleness import oldest_usable_version, stale_groups
from paceline_experience.ledger.state import GroupRecord, LedgerState
from paceline_experience.ledger.task_cursor import Draw, stable_seed

# All other reasons: requeue.
_VERDICTS = {
    GiveBackReason.INVALID: Verdict.INVALID,
    GiveBackReason.OVERSIZED: Verdict.OVERSIZED,
    GiveBackReason.VERSION_GONE: Verdict.GONE,
    GiveBackReason.DRAIN: Verdict.DRAIN,
    GiveBackReason.DENIED: Verdict.DRAIN,  # the job fails, and no attempt can be blamed
}
log = Log("leases")


def _lost(group: GroupRecord, index: int, detail: str) -> Report:
    key = (group.group_id, index, group.attempts[index])
    return Report(*key, Verdict.REQUEUE, detail, is_lost=True)


def _verdict(reason: GiveBackReason | None) -> Verdict:
    return Verdict.REQUEUE if reason is None else _VERDICTS.get(reason, Verdict.REQUEUE)


@dataclass(frozen=True, slots=True)
class Demand:
    """Episodes of a job that are leased, and those that could be."""

    leased: int
    queued: int
    new: int  # those that would be admitted
    eval_leased: int
    eval_queued: int
    group: int = 1  # episodes of a new group, on average


class Leases:
    """The ledger's operations for environment workers."""

    def __init__(
        self,
        *,
        core: LedgerContext,
        groups: Groups,
        tasks: TaskSource,
        eval_tasks: Mapping[str, TaskSource],
    ) -> None:
        self._core = core
        self._groups = groups
        self._sources: Sources | None = Sources(tasks, eval_tasks)
        spec = core.spec.experience
        self._allocation = groups.allocation
        self._limits = AdmissionLimits(
            batch_groups=spec.batch_groups,
            group_size=spec.group_size,
            max_staleness=spec.max_staleness,
            max_in_flight=spec.max_in_flight,
            payload_bytes=spec.payload_bytes,
        )
        self.mode = Mode(core, groups.back_off)

    def let_go(self) -> None:
        """Nothing is leased any more: the files of its tasks are closed."""
        self._sources = None

    @property
    def limits(self) -> AdmissionLimits:
        """What bounds admission, with the mean size of groups."""
        if self._allocation is None:
            return self._limits
        return replace(self._limits, group_size=self._groups.sizes.mean())

    def serve(self, versions: frozenset[int]) -> None:
        """Rollout workers sample with these policy versions."""
        if versions != self.mode.serving:
            self.mode.serving = versions
            self._core.work.fire()

    def load(self) -> AdmissionLoad:
        """The current load that bounds admission."""
        state, counts = self._core.state, self._core.state.counts
        step = serving_step(
            map(state.age, self.mode.serving),
            newest=state.age(state.version),
            step=state.step,
            max_staleness=self.limits.max_staleness,
        )
        return AdmissionLoad(
            step=step,
            accepted_groups=counts["groups:accepted"],
            open_groups=len(state.open),
            open_episodes=counts["queued"] + counts["leased"],
            payload_bytes=self._groups.payload_bytes,
            episode_bytes=self._groups.mean_bytes,
        )

    def headroom(self) -> int:
        """Groups that would be admitted now."""
        state = self._core.state
        if state.stop or state.meta.paused or state.version < 0 or not self._core.spec.trains:
            return 0
        return headroom(self.limits, self.load())

    def demand(self) -> Demand:
        """Leased episodes, and those that could be."""
        state, counts = self._core.state, self._core.state.counts
        size, held = self.limits.group_size, self.mode.holds
        new = 0 if self._core.cursor.exhausted or held else self.headroom() * size
        return Demand(
            leased=counts["leased"],
            queued=0 if state.stop or held else counts["queued"],
            new=new,
            eval_leased=counts["eval:leased"],
            eval_queued=0 if state.meta.paused else counts["eval:queued"],
            group=1 if self.mode.by_episode else size,
        )

    async def lease(
        self, *, worker_id: str, train: int, evals: int, allow_partial: bool = False
    ) -> list[Assignment]:
        """Up to `train` and `evals` episodes; older groups first, then new ones.

        With `allow_partial` the last new group may start with fewer episodes than it has.
        """
        async with self._core.transaction() as state:
            if self._sources is None:
                return []
            plan = LeasePlan(self._sources)
            if evals > 0 and not state.meta.paused:
                self._plan_queued(plan, state, state.queued_evals, evals)
            if train > 0 and not state.stop and not self.mode.holds:
                await self._groups.drop(self.mode.outdated(), DropReason.STALE)
                left = self._plan_queued(plan, state, state.queued, train)
                partial = allow_partial or self.mode.by_episode
                self._plan_new(plan, state, worker_id, left, allow_partial=partial)
            if not plan.lease:
                return []
            await self._core.change("lease", self._arguments(plan, worker_id))
            return await self._assignments(plan, state)

    def _plan_queued(
        self, plan: LeasePlan, state: LedgerState, names: set[str], credits: int
    ) -> int:
        for group in sorted((state.groups[name] for name in names), key=lambda g: g.seq):
            if credits <= 0:
                break
            indices = [i for i, s in enumerate(group.states) if s == "q"][:credits]
            plan.lease.append((group.group_id, indices))
            credits -= len(indices)
        return credits

    def _plan_new(
        self,
        plan: LeasePlan,
        state: LedgerState,
        worker_id: str,
        credits: int,
        *,
        allow_partial: bool,
    ) -> None:
        size = self.limits.group_size
        # A worker with fewer slots than a group gets a part of one, but only when idle:
        # otherwise single credits would split every group.
        tiny = 0 < credits < size and not plan.lease and state.held[worker_id] == 0
        groups = -(-credits // size) if allow_partial or tiny else credits // size
        not_begun: list[Draw] = []
        for _ in range(min(self.headroom(), groups)):
            if credits <= 0:  # the last one was larger than others
                break
            drawn = self._core.cursor.draw()
            if drawn is None:
                break
            wave = None
            if self._allocation is not None:
                wave = self._allocation.start(drawn, state.step)
                if wave is None:
                    not_begun.append(drawn)
                    continue
                size = wave.count
            name = f"{self._core.job_id}.{drawn.name}"
            plan.admit.append((name, drawn, wave))
            plan.lease.append((name, list(range(min(size, credits)))))
            credits -= size
        for drawn in not_begun:
            self._core.cursor.requeue(drawn)

    def _arguments(self, plan: LeasePlan, worker_id: str) -> str:
        return plan.script_argument(
            worker_id=worker_id,
            max_staleness=self.limits.max_staleness,
            batch_groups=self.limits.batch_groups,
            group_size=self._limits.group_size,
            feed=self._core.cursor.state() if plan.admit else "",
        )

    async def _assignments(self, plan: LeasePlan, state: LedgerState) -> list[Assignment]:
        progress = await self._stored_progress(plan, state)
        floor = oldest_usable_version(state, max_staleness=self.limits.max_staleness)
        assignments: list[Assignment] = []
        unusable: list[Report] = []
        for name, indices in plan.lease:
            group = state.groups[name]
            try:
                task = self._task(group, plan.sources)
                others = [self._read(plan.sources.train, at) for at in named_tasks(group, indices)]
            except InvalidError as error:
                verdict = Verdict.OVERSIZED if isinstance(error, LimitError) else Verdict.INVALID
                key = (name, indices[0], group.attempts[indices[0]])
                unusable.append(Report(*key, verdict, error.message))
                continue
            made = self._assignment(group, task, indices, progress.get(name, ()), floor)
            attempts = zip(made.indices, made.attempts, strict=True)
            self._groups.back_off.begun((name, index, attempt) for index, attempt in attempts)
            assignments.append(replace(made, tasks=tuple(others)) if others else made)
        if unusable:
            await self._groups.report(unusable)
        return assignments

    def _assignment(
        self,
        group: GroupRecord,
        task: Task,
        indices: list[int],
        progress: Sequence[EpisodeProgress],
        floor: int,
    ) -> Assignment:
        spec = self._core.spec
        # All groups of evals belong to the open run.
        run = self._core.state.meta.eval if group.is_eval else None
        owner = spec.eval_sets[run.name].seed if run is not None else spec.tasks.seed
        number = group.position if group.is_eval else group.seq
        return Assignment(
            job_id=self._core.job_id,
            group_id=group.group_id,
            indices=tuple(indices),
            attempts=tuple(group.attempts[i] for i in indices),
            task=task,
            purpose=Purpose.EVAL if group.is_eval else Purpose.TRAIN,
            lease_s=spec.experience.lease_s,
            seed=stable_seed(owner, "eval" if group.is_eval else "train", number),
            pinned_version=group.version,
            min_version=-1 if group.is_eval else floor,
            progress=tuple(progress),
            traces=self._core.traces.contexts(group.group_id, indices),
            starts=episode_starts(group, indices),
            eval_set=run.name if run is not None else "",
        )

    def _task(self, group: GroupRecord, sources: Sources) -> Task:
        run = self._core.state.meta.eval if group.is_eval else None
        if run is not None:
            return self._read(sources.evals[run.name], group.position, "eval task")
        return self._read(sources.train, group.position)

    def _read(self, source: TaskSource, position: int, label: str = "task") -> Task:
        """A task of a source.

        Raises:
            LimitError: it is too large.
            InvalidError: the source has failed, or its task cannot be sent.
        """
        report = partial(
            log.exception, "a task source has failed", job=self._core.job_id, position=position
        )
        with plugin_boundary(f"{label} {position}", passes=(InvalidError,), report=report):
            task = source[position]
            num_bytes = wire.to_proto(task, pb.Task).ByteSize()
        if problem := self._core.limits.excess("task_bytes", num_bytes):
            raise LimitError(f"{label} {position}: {problem}")
        return task

    async def _stored_progress(
        self, plan: LeasePlan, state: LedgerState
    ) -> dict[str, list[EpisodeProgress]]:
        wanted = [
            (name, index, state.groups[name].attempts[index])
            for name, indices in plan.lease
            for index in indices
            if state.groups[name].attempts[index] > 1
        ]
        found: dict[str, list[EpisodeProgress]] = {}
        if wanted:
            fields = [f"{name}/{index}" for name, index, _ in wanted]
            blobs = await self._core.store.command("HMGET", self._core.keys.progress, *fields)
            for (name, _, attempt), blob in zip(wanted, blobs, strict=True):
                if blob is not None:
                    message = pb.EpisodeProgress.FromString(blob)
                    message.attempt = attempt
                    found.setdefault(name, []).append(wire.from_proto(message, EpisodeProgress))
        if self._allocation is not None:
            for name, indices in plan.lease:
                have = {each.index for each in found.get(name, ())}
                group = state.groups[name]
                prefixes = await self._groups.prefixes(group, [i for i in indices if i not in have])
                if prefixes:
                    found.setdefault(name, []).extend(prefixes)
        return found

    async def renew(
        self, *, keys: Sequence[EpisodeKey], progress: Sequence[EpisodeProgress]
    ) -> list[EpisodeKey]:
        """Extend leases and store progress; returns what the worker must abort."""
        async with self._core.transaction() as state:
            lost: dict[tuple[str, int, int], EpisodeKey] = {}
            deadline = self._core.lease_end()
            reported = [EpisodeKey(p.group_id, p.index, p.attempt) for p in progress]
            for key in [*keys, *reported]:
                group = state.find(key.group_id, key.index, key.attempt)
                if group is None:
                    lost[key.group_id, key.index, key.attempt] = key
                else:
                    group.deadlines[key.index] = deadline
            valid = [p for p in progress if (p.group_id, p.index, p.attempt) not in lost]
            if valid:
                await self._store_progress(state, valid)
            return list(lost.values())

    async def _store_progress(
        self, state: LedgerState, progress: Sequence[EpisodeProgress]
    ) -> None:
        for item in progress:
            seen = [t.oldest_version for t in item.transcripts if t.num_policy_tokens]
            group = state.groups[item.group_id]
            group.sampled[item.index] = sum(t.num_policy_tokens for t in item.transcripts)
            if seen:
                known = [group.oldest_seen] if group.oldest_seen >= 0 else []
                group.oldest_seen = min([*seen, *known])
        max_bytes = self._core.limits.of.trajectory_bytes
        blobs = [(p, wire.to_proto(p, pb.EpisodeProgress).SerializeToString()) for p in progress]
        # An episode that is too large to be accepted when finished is not worth resuming either.
        small = [(p, blob) for p, blob in blobs if len(blob) <= max_bytes]
        if small:
            names = [
                {"group": p.group_id, "index": p.index, "attempt": p.attempt} for p, _ in small
            ]
            await self._core.change("progress", json.dumps(names), *(blob for _, blob in small))

    async def give_back(self, keys: Sequence[EpisodeKey]) -> None:
        """Requeue or drop episodes, depending on the reason of each."""
        reports = [
            Report(k.group_id, k.index, k.attempt, _verdict(k.reason), k.detail) for k in keys
        ]
        async with self._core.transaction():
            await self._groups.report(reports)

    async def release(
        self,
        worker_id: str,
        *,
        keep: Collection[EpisodeKey] = (),
        unless: Callable[[], bool] = lambda: False,
    ) -> int:
        """Requeue all leases of a worker but those to `keep`; returns how many.

        It counts as an attempt, since the episode may be what kills its workers. Does nothing if
        `unless` is true once the transaction has begun.
        """
        kept = {(key.group_id, key.index, key.attempt) for key in keep}
        async with self._core.transaction() as state:
            if unless():
                return 0
            self._groups.aborts.pop(worker_id)  # it has begun anew, or is gone
            lost = [
                _lost(g, i, "its worker is gone")
                for g, i in state.leased()
                if g.workers[i] == worker_id and (g.group_id, i, g.attempts[i]) not in kept
            ]
            if lost:
                await self._groups.report(lost)
                self._core.meter.expired(len(lost))
        return len(lost)

    async def return_all(self) -> None:
        """Requeue all leases as if their workers had drained: it counts as no attempt."""
        async with self._core.transaction() as state:
            reports = [
                Report(g.group_id, i, g.attempts[i], Verdict.DRAIN, "") for g, i in state.leased()
            ]
            if reports:
                await self._groups.report(reports)

    async def expire(self) -> int:
        """Requeue episodes whose leases have expired; returns how many."""
        now = self._core.clock.now()
        async with self._core.transaction() as state:
            expired = [
                _lost(g, i, "lease expired") for g, i in state.leased() if g.deadlines[i] < now
            ]
            if expired:
                await self._groups.report(expired)
                self._core.meter.expired(len(expired))
        return len(expired)

    async def release_stragglers(self, waiting_s: float) -> int:
        """Drop stale open groups that block admission, once the trainer has waited long enough.

        Long enough is `straggler_timeout_s`. Returns how many groups were dropped.
        """
        spec = self._core.spec.experience
        if waiting_s < spec.straggler_timeout_s:
            return 0
        async with self._core.transaction() as state:
            load = self.load()
            if load.accepted_groups + load.open_groups < bound(self.limits, load.step):
                return 0
            stale = stale_groups(
                state, state.open, step=state.step, max_staleness=spec.max_staleness
            )
            await self._groups.drop(stale, DropReason.STALE)
        return len(stale)
