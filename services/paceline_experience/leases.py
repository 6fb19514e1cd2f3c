"""Hands out episodes, renews leases and takes them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from paceline import wire
from paceline.errors import InvalidError, LimitError
from paceline.interfaces import TaskSource
from paceline.logs import Log
from paceline.types import Assignment, DropReason, Progress, Purpose, Task
from paceline.v1 import types_pb2 as pb
from paceline_experience.admission import Limits, Load, bound, headroom, serving_step
from paceline_experience.book import Book, Group
from paceline_experience.core import Core
from paceline_experience.feed import Draw, stable_seed
from paceline_experience.groups import Groups, Report


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """One lease: an attempt at an episode; `reason` and `detail` when it is given back."""

    group_id: str
    index: int
    attempt: int
    reason: str = ""
    detail: str = ""


# All other reasons: queue again.
_VERDICTS = {
    "invalid": "invalid",
    "oversized": "oversized",
    "version_gone": "gone",
    "drain": "drain",
}
log = Log("leases")


@dataclass(frozen=True, slots=True)
class Demand:
    """Episodes of a job that are out, and those that could be."""

    leased: int
    queued: int
    new: int  # that would be admitted
    eval_leased: int
    eval_queued: int


@dataclass(slots=True)
class _Plan:
    lease: list[tuple[str, list[int]]] = field(default_factory=list[tuple[str, list[int]]])
    admit: list[tuple[str, Draw]] = field(default_factory=list[tuple[str, Draw]])


class Leases:
    """The side of the ledger that environment workers see."""

    def __init__(
        self,
        *,
        core: Core,
        groups: Groups,
        tasks: TaskSource,
        eval_tasks: TaskSource | None,
    ) -> None:
        self._core = core
        self._groups = groups
        self._tasks = tasks
        self._eval_tasks = eval_tasks
        spec = core.spec.experience
        self.limits = Limits(
            batch_groups=spec.batch_groups,
            group_size=spec.group_size,
            max_staleness=spec.max_staleness,
            max_in_flight=spec.max_in_flight,
            payload_bytes=spec.payload_bytes,
        )
        self._serving: frozenset[int] = frozenset()

    def serve(self, versions: frozenset[int]) -> None:
        """The policy versions that rollout workers answer with."""
        if versions != self._serving:
            self._serving = versions
            self._core.work.fire()

    def load(self) -> Load:
        """What bounds admission, as it is."""
        book, counts = self._core.book, self._core.book.counts
        step = serving_step(
            map(book.age, self._serving),
            newest=book.age(book.version),
            step=book.step,
            max_staleness=self.limits.max_staleness,
        )
        return Load(
            step=step,
            accepted_groups=counts["groups:accepted"],
            open_groups=len(book.open),
            open_episodes=counts["queued"] + counts["leased"],
            payload_bytes=self._groups.payload_bytes,
            episode_bytes=self._groups.mean_bytes,
        )

    def headroom(self) -> int:
        """Groups that would be admitted at this moment."""
        book = self._core.book
        return 0 if book.stop or book.version < 0 else headroom(self.limits, self.load())

    def demand(self) -> Demand:
        """What is out, and what could be."""
        book, counts = self._core.book, self._core.book.counts
        new = 0 if self._core.feed.over else self.headroom() * self.limits.group_size
        return Demand(
            leased=counts["leased"],
            queued=0 if book.stop else counts["queued"],
            new=new,
            eval_leased=counts["eval:leased"],
            eval_queued=counts["eval:queued"],
        )

    async def lease(
        self, *, worker_id: str, train: int, evals: int, part: bool = False
    ) -> list[Assignment]:
        """Up to `train` and `evals` episodes; older groups first, then new ones.

        With `part` the last new group may begin with fewer episodes than it has.
        """
        async with self._core.transaction() as book:
            plan = _Plan()
            if evals > 0:
                self._plan_queued(plan, book, book.queued_evals, evals)
            if train > 0 and not book.stop:
                left = self._plan_queued(plan, book, book.queued, train)
                self._plan_new(plan, book, worker_id, left, part=part)
            if not plan.lease:
                return []
            await self._core.change("lease", self._arguments(plan, worker_id))
            return await self._assignments(plan, book)

    def _plan_queued(self, plan: _Plan, book: Book, names: set[str], credits: int) -> int:
        for group in sorted((book.groups[name] for name in names), key=lambda g: g.seq):
            if credits <= 0:
                break
            indices = [i for i, s in enumerate(group.states) if s == "q"][:credits]
            plan.lease.append((group.group_id, indices))
            credits -= len(indices)
        return credits

    def _plan_new(
        self, plan: _Plan, book: Book, worker_id: str, credits: int, *, part: bool
    ) -> None:
        size = self.limits.group_size
        # A worker with fewer slots than a group has gets a part of one, but only when idle:
        # otherwise single credits would tear every group apart.
        tiny = 0 < credits < size and not plan.lease and book.held[worker_id] == 0
        groups = -(-credits // size) if part or tiny else credits // size
        for _ in range(min(self.headroom(), groups)):
            drawn = self._core.feed.draw()
            if drawn is None:
                break
            name = f"{self._core.job_id}.{drawn.name}"
            plan.admit.append((name, drawn))
            plan.lease.append((name, list(range(min(size, credits)))))
            credits -= size

    def _arguments(self, plan: _Plan, worker_id: str) -> str:
        size, book = self.limits.group_size, self._core.book
        fields = {
            "worker": worker_id,
            "bound": [self.limits.max_staleness, self.limits.batch_groups],
            "admit": [[name, d.seq, d.position, size, d.again] for name, d in plan.admit],
            "lease": plan.lease,
            "feed": self._core.feed.state() if plan.admit else book.meta.get("feed", ""),
        }
        return json.dumps(fields)

    async def _assignments(self, plan: _Plan, book: Book) -> list[Assignment]:
        kept = await self._kept_progress(plan, book)
        floor = self._floor(book)
        made: list[Assignment] = []
        unusable: list[Report] = []
        for name, indices in plan.lease:
            group = book.groups[name]
            try:
                task = self._task(group)
            except InvalidError as error:
                reason = DropReason.OVERSIZED if isinstance(error, LimitError) else "invalid"
                key = (name, indices[0], group.attempts[indices[0]])
                unusable.append(Report(*key, reason, error.message))
                continue
            made.append(self._assignment(group, task, indices, kept.get(name, ()), floor))
        if unusable:
            await self._groups.report(unusable)
        return made

    def _floor(self, book: Book) -> int:
        """The oldest version that can sample tokens for the present step, else the newest."""
        oldest = book.step - self.limits.max_staleness
        # One by one of those that are known: a number that the store has lost ends nothing.
        newest_first = sorted(book.ages, reverse=True)
        fresh = takewhile(lambda known: book.ages[known] >= oldest, newest_first)
        return min(fresh, default=book.version)

    def _assignment(
        self,
        group: Group,
        task: Task,
        indices: list[int],
        progress: Sequence[Progress],
        floor: int,
    ) -> Assignment:
        spec = self._core.spec
        owner = spec.eval.seed if group.is_eval and spec.eval else spec.tasks.seed
        place = group.position if group.is_eval else group.seq
        return Assignment(
            job_id=self._core.job_id,
            group_id=group.group_id,
            indices=tuple(indices),
            attempts=tuple(group.attempts[i] for i in indices),
            task=task,
            purpose=Purpose.EVAL if group.is_eval else Purpose.TRAIN,
            lease_s=spec.experience.lease_s,
            seed=stable_seed(owner, "eval" if group.is_eval else "train", place),
            pinned_version=group.version,
            min_version=-1 if group.is_eval else floor,
            progress=tuple(progress),
            traces=self._core.traces.sent(group.group_id, indices),
        )

    def _task(self, group: Group) -> Task:
        """What a group is to do.

        Raises:
            LimitError: it is too large.
            InvalidError: the source makes none, or none that can be sent.
        """
        is_eval = group.is_eval and self._eval_tasks is not None
        where = "eval task" if is_eval else "task"
        source = self._eval_tasks if is_eval and self._eval_tasks is not None else self._tasks
        try:
            task = source[group.position]
            num_bytes = wire.task_to(task).ByteSize()
        except InvalidError:
            raise
        except Exception as error:  # a task source may raise anything; other jobs go on
            log.exception("no task", job=self._core.job_id, position=group.position)
            text = f"{where} {group.position}: {type(error).__name__}: {error}"
            raise InvalidError(text) from None
        if problem := self._core.limits.excess("task_bytes", num_bytes):
            raise LimitError(f"{where} {group.position}: {problem}")
        return task

    async def _kept_progress(self, plan: _Plan, book: Book) -> dict[str, list[Progress]]:
        wanted = [
            (name, index, book.groups[name].attempts[index])
            for name, indices in plan.lease
            for index in indices
            if book.groups[name].attempts[index] > 1
        ]
        found: dict[str, list[Progress]] = {}
        if not wanted:
            return found
        fields = [f"{name}/{index}" for name, index, _ in wanted]
        kept = await self._core.store.command("HMGET", self._core.keys.progress, *fields)
        for (name, _, attempt), blob in zip(wanted, kept, strict=True):
            if blob is not None:
                message = pb.Progress.FromString(blob)
                message.attempt = attempt
                found.setdefault(name, []).append(wire.progress_from(message))
        return found

    async def renew(
        self, *, keys: Sequence[EpisodeKey], progress: Sequence[Progress]
    ) -> list[EpisodeKey]:
        """Prolong leases and keep progress; what the worker must abort."""
        async with self._core.transaction() as book:
            lost: dict[tuple[str, int, int], EpisodeKey] = {}
            end = self._core.lease_end()
            told = [EpisodeKey(p.group_id, p.index, p.attempt) for p in progress]
            for key in [*keys, *told]:
                group = book.find(key.group_id, key.index, key.attempt)
                if group is None:
                    lost[key.group_id, key.index, key.attempt] = key
                else:
                    group.deadlines[key.index] = end
            valid = [p for p in progress if (p.group_id, p.index, p.attempt) not in lost]
            if valid:
                await self._keep(book, valid)
            return list(lost.values())

    async def _keep(self, book: Book, progress: Sequence[Progress]) -> None:
        for item in progress:
            seen = [t.oldest_version for t in item.transcripts if t.num_policy_tokens]
            group = book.groups[item.group_id]
            if seen:
                known = [group.oldest_seen] if group.oldest_seen >= 0 else []
                group.oldest_seen = min([*seen, *known])
        most = self._core.limits.of.trajectory_bytes
        blobs = [(p, wire.progress_to(p).SerializeToString()) for p in progress]
        # What is too large to be taken in when it is done is not worth a second start either.
        kept = [(p, blob) for p, blob in blobs if len(blob) <= most]
        if kept:
            names = json.dumps([[p.group_id, p.index, p.attempt] for p, _ in kept])
            await self._core.change("progress", names, *(blob for _, blob in kept))

    async def give_back(self, keys: Sequence[EpisodeKey]) -> None:
        """Queue again, or drop, as the reasons say."""
        reports = [
            Report(k.group_id, k.index, k.attempt, _VERDICTS.get(k.reason, "again"), k.detail)
            for k in keys
        ]
        async with self._core.transaction():
            await self._groups.report(reports)

    async def release(
        self,
        worker_id: str,
        *,
        kept: Collection[EpisodeKey] = (),
        unless: Callable[[], bool] = lambda: False,
    ) -> int:
        """Queue again what a worker has no more, all but what it has `kept`; how many.

        It counts as an attempt: an episode may be what kills its workers. Nothing happens if
        `unless` says so when its turn has come.
        """
        held = {(key.group_id, key.index, key.attempt) for key in kept}
        async with self._core.transaction() as book:
            if unless():
                return 0
            gone = [
                Report(g.group_id, i, g.attempts[i], "again", "its worker is gone")
                for g, i in book.leased()
                if g.workers[i] == worker_id and (g.group_id, i, g.attempts[i]) not in held
            ]
            if gone:
                await self._groups.report(gone)
                self._core.meter.expired(len(gone))
        return len(gone)

    async def expire(self) -> int:
        """Queue again what nobody renewed; how many."""
        now = self._core.clock.now()
        async with self._core.transaction() as book:
            late = [
                Report(g.group_id, i, g.attempts[i], "again", "lease expired")
                for g, i in book.leased()
                if g.deadlines[i] < now
            ]
            if late:
                await self._groups.report(late)
                self._core.meter.expired(len(late))
        return len(late)

    async def release_stragglers(self, waiting_s: float) -> int:
        """At the bound, drop open groups too old to be trained once the trainer waited `hold_s`."""
        spec = self._core.spec.experience
        if waiting_s < spec.hold_s:
            return 0
        async with self._core.transaction() as book:
            load = self.load()
            if load.accepted_groups + load.open_groups < bound(self.limits, load.step):
                return 0
            late = [
                name
                for name in book.open
                if book.staleness(book.groups[name], book.step) > spec.max_staleness
            ]
            await self._groups.drop(late, DropReason.STALE)
        return len(late)
