"""The ledger of one job: a thin front over leases, groups, batches, evals and the end."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from paceline.config import JobSpec
from paceline.config.service import ExperienceOptions
from paceline.errors import StateError
from paceline.interfaces import TaskSource
from paceline.logs import Log
from paceline.tracing import OFF, Tracer
from paceline.types import Assignment, PolicyVersion, Progress, Trajectory
from paceline.v1 import types_pb2 as pb
from paceline_experience.audit import AuditReport, audit
from paceline_experience.batches import Batches, fence
from paceline_experience.clock import Clock, JobClock
from paceline_experience.core import Core, Hooks
from paceline_experience.counts import by_reason, by_state
from paceline_experience.ending import Ending
from paceline_experience.evals import Evals
from paceline_experience.failures import Failures
from paceline_experience.feed import Feed
from paceline_experience.groups import Groups
from paceline_experience.keys import JobKeys
from paceline_experience.leases import Demand, EpisodeKey, Leases
from paceline_experience.meter import JobMeter
from paceline_experience.payloads import PayloadStore
from paceline_experience.quotas import JobLimits
from paceline_experience.shares import BatchShare
from paceline_experience.sources import make_sampler
from paceline_experience.store import Store
from paceline_experience.trajectories import Trajectories
from paceline_experience.watermarks import Watermarks

log = Log("ledger")
__all__ = ["AuditReport", "BatchShare", "Demand", "EpisodeKey", "Hooks", "JobLedger"]


class JobLedger:
    """One job; all state in Redis, rebuilt by `open`; one object per job and process."""

    def __init__(
        self,
        *,
        store: Store,
        job_id: str,
        tenant: str,
        spec: JobSpec,
        tasks: TaskSource,
        eval_tasks: TaskSource | None,
        payloads: PayloadStore,
        hooks: Hooks,
        options: ExperienceOptions,
        limits: JobLimits | None = None,
        clock: Clock | None = None,
        epoch: int = 0,
        watermarks: Watermarks | None = None,
        tracer: Tracer = OFF,
        meter: JobMeter | None = None,
    ) -> None:
        feed = Feed(make_sampler(spec, len(tasks)), kind=spec.experience.sampler.kind)
        core = Core(
            store=store,
            keys=JobKeys(tenant, job_id),
            job_id=job_id,
            spec=spec,
            clock=clock or JobClock(store.now),
            feed=feed,
            limits=limits or JobLimits(tenant),
            epoch=epoch,
            watermarks=watermarks,
            tracer=tracer,
            meter=meter,
        )
        over = options.compress_over_bytes
        groups = Groups(core=core, payloads=payloads, compress_over_bytes=over)
        self._core, self._groups, self._payloads = core, groups, payloads
        self._hooks, self._rows_told = hooks, -1
        self._leases = Leases(core=core, groups=groups, tasks=tasks, eval_tasks=eval_tasks)
        self._batches = Batches(core=core, groups=groups, payloads=payloads)
        self._evals = Evals(core=core, groups=groups, eval_tasks=eval_tasks)
        self.trajectories = Trajectories(core=core, payloads=payloads)
        self._ending = Ending(
            core=core,
            groups=groups,
            leases=self._leases,
            batches=self._batches,
            evals=self._evals,
            hooks=hooks,
        )

    async def open(self) -> None:
        """Read what Redis holds; leases get their full time again."""
        self._core.when_back(self._begin_anew)
        async with self._core.transaction():
            await self._begin()

    async def _begin(self) -> None:
        """Inside a transaction: bring to order what a crash left."""
        listed = await self._core.listed()
        await self._groups.open(listed.__contains__)
        await self._groups.settle(list(self._core.book.open))
        granted = self._core.watermarks.highest("incarnation")
        if granted > self._core.book.number("incarnation"):  # the store has lost the grant
            await self._core.note(incarnation=granted)

    async def _begin_anew(self) -> None:
        """The store has gone back: what is remembered beside the book goes back with it."""
        self._batches.forget()
        await self._begin()
        await self._hooks.went_back()

    async def record(self) -> None:
        """Tell the hooks of new rows in the history, until they have heard of them."""
        written = self._core.rows_written
        if written != self._rows_told:
            await self._hooks.recorded()
            self._rows_told = written

    # environment workers

    async def lease(
        self, *, worker_id: str, train: int, evals: int, part: bool = False
    ) -> list[Assignment]:
        """Up to so many episodes, admitted as needed; empty when nothing is due.

        With `part` the last new group may begin with fewer episodes than it has.
        """
        return await self._leases.lease(worker_id=worker_id, train=train, evals=evals, part=part)

    def demand(self) -> Demand:
        """Episodes that are out, and those that could be, as of the last change."""
        return self._leases.demand()

    def held(self, worker_id: str) -> int:
        """Episodes that a worker has of this job."""
        return self._core.book.held[worker_id]

    def holders(self) -> list[str]:
        """Workers that have episodes of this job."""
        return [worker_id for worker_id, count in self._core.book.held.items() if count > 0]

    async def refresh(self) -> None:
        """Read again what Redis holds if it is unknown what was written last."""
        async with self._core.transaction():
            pass

    def serve(self, versions: Iterable[int]) -> None:
        """Rollout workers answer with these versions; admission waits for weights on their way."""
        served = frozenset(version for version in versions if version >= 0)
        self._leases.serve(served)
        self._core.traces.served(served)

    def close(self) -> None:
        """Nobody will follow this job here any more."""
        self._core.traces.close()

    def wakeup(self) -> asyncio.Event:
        """Set when leasable work may exist: take it before `lease`, wait for it after."""
        return self._core.work.event()

    async def renew(
        self, *, worker_id: str, keys: Sequence[EpisodeKey], progress: Sequence[Progress]
    ) -> list[EpisodeKey]:
        """Prolong leases and keep progress; what the worker must abort."""
        del worker_id  # the attempt says who holds the lease
        return await self._leases.renew(keys=keys, progress=progress)

    async def give_back(self, *, worker_id: str, keys: Sequence[EpisodeKey]) -> None:
        """Take episodes back for the reason that each key names."""
        del worker_id
        await self._leases.give_back(keys)
        await self._ending.check()

    async def release(
        self,
        *,
        worker_id: str,
        kept: Collection[EpisodeKey] = (),
        unless: Callable[[], bool] = lambda: False,
    ) -> int:
        """Hand out again what a worker has no more, all but what it has `kept`; how many."""
        return await self._leases.release(worker_id, kept=kept, unless=unless)

    async def submit(self, trajectories: Sequence[Trajectory | pb.Trajectory | bytes]) -> list[str]:
        """Accepted, duplicate, superseded, requeued or dropped, for each trajectory."""
        return await self._groups.submit(trajectories)

    # trainer

    async def grant_incarnation(self) -> int:
        """The number of the next start of the trainer; older ones are refused from then on."""
        async with self._core.transaction() as book:
            granted = self._core.watermarks.highest("incarnation")
            number = max(book.number("incarnation"), granted) + 1
            await self._core.note(incarnation=number)
            await self._core.watermarks.reach("incarnation", number)
        self._core.ready.fire()
        return number

    async def report_failure(self, *, incarnation: int, reason: str) -> tuple[int, str]:
        """A life of the trainer has ended badly (0: the newest); see `Failures`."""
        async with self._core.transaction() as book:
            before = Failures.decode(book.meta.get("failures", ""))
            after = before.after(
                incarnation or book.number("incarnation"),
                newest=book.number("incarnation"),
                step=book.step,
                reason=reason,
            )
            if after != before:
                await self._core.note(failures=after.encode())
        return after.count, after.reason

    async def rewind(self, *, incarnation: int, step: int) -> tuple[int, int]:
        """Start from the checkpoint of `step`; that step and the newest version."""
        return await self._batches.rewind(incarnation=incarnation, step=step)

    async def take(self, *, incarnation: int, step: int, rank: int, world: int) -> BatchShare:
        """This rank's part of the batch of `step`; waits until there is one."""
        share = await self._batches.take(incarnation=incarnation, step=step, rank=rank, world=world)
        await self._ending.told(share.stop)
        return share

    async def commit(
        self, *, incarnation: int, step: int, batch_id: str, metrics: dict[str, Any]
    ) -> tuple[int, str]:
        """The step is trained; the ledger's step, and why no further batch will come."""
        reported = self._reported(metrics)

        def describe(stats: Mapping[str, Any], counts: Counter[str]) -> dict[str, Any]:
            version = self._core.book.version
            return {**reported, **stats, "version": version, **self._totals(counts)}

        done, values = await self._batches.commit(
            incarnation=incarnation, step=step, batch_id=batch_id, describe=describe
        )
        if values is not None:
            self._core.meter.row("train", values)
        await self.record()
        await self._ending.check()
        await self._ending.told(self._core.book.stop)
        return done, self._core.book.stop

    def _reported(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """What a trainer said of a step, or how much it was if that is too much to be kept."""
        num_bytes = len(json.dumps(metrics).encode())
        if problem := self._core.limits.excess("metrics_bytes", num_bytes):
            log.warning("metrics of a step are left out", job=self._core.job_id, error=problem)
            return {"oversized_bytes": num_bytes}
        return metrics

    async def checkpointed(
        self, *, incarnation: int, step: int, path: str, kept: Sequence[int] = ()
    ) -> None:
        """The checkpoint of `step` is durable; those of the steps `kept` can be gone back to."""
        await self._batches.checkpointed(incarnation=incarnation, step=step, path=path, kept=kept)

    async def trim(self) -> None:
        """Let go of trajectories that need not be kept any more."""
        async with self._core.transaction():
            await self._batches.trim(self._core.spec.experience.keep_trajectories)

    async def announce(
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
        """Number a publication; the same announcement again gets the same number.

        Its digest is noted when it is first told. With `number` it is told again by who was given
        that number for it: should the store have lost it, it is entered as it was. A new number is
        higher than `above`, than the parent, and than any that was handed out.

        Raises:
            StateError: the step is not trained, or another publication has this number.
            UnavailableError: the number could not be made durable; ask again.
        """
        core = self._core
        async with core.transaction() as book:
            fence(book, incarnation)
            floor = max(above, parent, core.watermarks.highest("version"))
            made = await core.change(
                "announce", incarnation, step, parent, num_bytes, digest, floor, number
            )
            await core.watermarks.reach("version", int(made["version"]))
            core.add_version(book, made)
            core.traces.announced(int(made["version"]), step=step, incarnation=incarnation)
            first = not book.meta.get("started")
            if first:
                await core.note(started=repr(core.clock.now()))
        if first:
            await self._hooks.running()
        await self._evals.announced(step)
        core.work.fire()
        return _version(made)

    async def publication(self, *, incarnation: int, step: int) -> PolicyVersion | None:
        """What this incarnation has announced of a step; None: nothing yet.

        Raises:
            StateError: it has announced a later step.
        """
        async with self._core.transaction() as book:
            fence(book, incarnation)
            last, digest = book.versions.get(book.version), book.digests.get(book.version, "")
        if last is None or last["incarnation"] != incarnation or last["step"] < step:
            return None
        if last["step"] > step:
            raise StateError(f"step {step} was to be seeded, but {last['step']} is announced")
        return _version({**last, "digest": digest})

    def publications(self) -> list[PolicyVersion]:
        """Everything that was ever published, in order."""
        book = self._core.book
        return [
            _version({**v, "digest": book.digests[n]}) for n, v in sorted(book.versions.items())
        ]

    # the job

    async def hold(self) -> int:
        """The version at which eval workers are to be held; -1: none."""
        return self._evals.held()

    async def stop(self, reason: str) -> None:
        """`cancelled` drops what is untrained, `paused` only stops admission, empty resumes."""
        await self._ending.stop(reason)

    async def fail(self, reason: str) -> None:
        """Drop what is untrained; sweeps bring the job to its end, however often that takes."""
        await self._ending.fail(reason)

    async def sweep(self) -> None:
        """Look after expired leases, stragglers, evals and the end; call it every `sweep_s`."""
        await self._core.compare()
        await self._leases.expire()
        await self._leases.release_stragglers(self._batches.waiting_s)
        await self._evals.sweep()
        await self.record()
        await self._ending.check()
        await self._ending.advance()
        wants = self._leases.demand()
        if wants.new or wants.queued or wants.eval_queued:  # room can come from what told nobody
            self._core.work.fire()
        await self._core.keep_time()  # last: a store that is full lets the rest be done

    @property
    def counts(self) -> Counter[str]:
        """The ledger's counters, as of the last change."""
        return self._core.book.counts

    @property
    def payload_bytes(self) -> int:
        """Of all its trajectories in the store."""
        return self._groups.payload_bytes

    @property
    def incarnation(self) -> int:
        """Of the newest trainer; 0: none was started yet."""
        return self._core.book.number("incarnation")

    @property
    def stopping(self) -> bool:
        """Whether no further batch will come."""
        return bool(self._core.book.stop)

    @property
    def closed(self) -> bool:
        """Whether nothing will be trained any more."""
        return self._core.book.closed

    def awaited(self) -> str:
        """Which service a trainer waits for that has asked for a batch; empty: none has."""
        if not self._batches.waiting:
            return ""
        load = self._leases.load()
        held_up = load.step < self._core.book.step and self._leases.headroom() == 0
        return "weights" if held_up and not load.open_episodes else "environment"

    async def audit(self) -> AuditReport:
        """Count everything again."""
        return await audit(self._core, self._payloads)

    async def live(self) -> dict[str, Any]:
        """Counts, waits and rates at this moment, without asking Redis."""
        book, load = self._core.book, self._leases.load()
        reward = book.meta.get("eval_reward")
        last = book.batches.get(book.step - 1, {}).get("stats", {})
        return {
            **self._totals(book.counts),
            "step": book.step,
            "version": book.version,
            "stop": book.stop,
            "open_groups": load.open_groups,
            "accepted_groups": load.accepted_groups,
            "ready_groups": len(book.ready),
            "headroom_groups": self._leases.headroom(),
            "payload_bytes": load.payload_bytes,
            "waiting": self._batches.waiting,
            "waiting_s": self._batches.waiting_s,
            "reward_mean": last.get("reward_mean"),
            "eval": self._evals.progress(),
            "eval_last": self._evals.last,
            "eval_reward": float(reward) if reward else None,
            "eval_step": book.number("eval_step") if reward else None,
            "eval_reward_start": float(book.meta["eval_start"]) if reward else None,
        }

    def _totals(self, counts: Counter[str]) -> dict[str, Any]:
        ages = {k.removeprefix("stale:"): n for k, n in counts.items() if k.startswith("stale:")}
        return {
            "counts": by_state(counts),
            "dropped": by_reason(counts),
            "tokens_generated": counts["tokens"],
            "eval_tokens": counts["eval:tokens"],
            "trained_tokens": counts["trained_tokens"],
            "staleness_histogram": ages,
            "trainer_wait_total_s": self._batches.waited_s,
        }


def _version(made: Mapping[str, Any]) -> PolicyVersion:
    return PolicyVersion(
        version=int(made["version"]),
        step=int(made["step"]),
        parent=int(made["parent"]),
        incarnation=int(made["incarnation"]),
        digest=made.get("digest", ""),
        num_bytes=int(made["num_bytes"]),
    )
