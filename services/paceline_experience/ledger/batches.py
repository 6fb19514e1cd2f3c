"""Fixes the batch of each step, serves it to the ranks, and follows the trainer's steps."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.enums import DropReason, StopReason
from paceline.errors import FencedError, IntegrityError, InvalidError, StateError
from paceline.platform.text import clipped
from paceline_experience.ledger import shares
from paceline_experience.ledger.advantages.estimator import Estimator, FixedEstimate
from paceline_experience.ledger.checkpoints import retained
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.groups import Groups
from paceline_experience.ledger.own.later import LaterEstimate
from paceline_experience.ledger.records import BatchRecord, field_texts, record_text, row_text
from paceline_experience.ledger.shares import Batch, BatchShare
from paceline_experience.ledger.staleness import stale_groups
from paceline_experience.ledger.state import GroupRecord, LedgerState
from paceline_experience.ledger.stored.samples import PayloadNote
from paceline_experience.ledger.trajectories import note_dropped, step_of
from paceline_experience.store.payloads import PayloadStore

_POLL_S = 1.0
_YIELD_EVERY = 64
# Makes the values of a step's row from its batch's statistics and the counters after it.
Describe = Callable[[Mapping[str, Any], Counter[str]], dict[str, Any]]


class Batches:
    """The ledger's operations for the trainer."""

    def __init__(
        self, *, core: LedgerContext, groups: Groups, payloads: PayloadStore, estimator: Estimator
    ) -> None:
        self._core = core
        self._groups = groups
        self._payloads = payloads
        self._estimator = estimator
        # In a transaction, own code that is slow would keep all others of the job waiting.
        self._later = LaterEstimate(estimator, payloads, core.ready) if estimator.slow else None
        self._built: Batch | None = None
        self._advantages: dict[str, PayloadNote] = {}  # of that batch, by payload
        self._building = asyncio.Lock()
        self._takers = 0
        self._waiting_since: float | None = None
        self._waited_s = 0.0
        self.problem = ""  # the advantage has failed, and the job fails with this

    @property
    def waiting(self) -> bool:
        """Whether the trainer is waiting for a batch."""
        return self._waiting_since is not None

    @property
    def waiting_s(self) -> float:
        """How long the trainer has been waiting for its next batch."""
        return 0.0 if self._waiting_since is None else self._core.clock.now() - self._waiting_since

    @property
    def waited_s(self) -> float:
        """Total wait so far, including the present one."""
        return self._waited_s + self.waiting_s

    def forget(self) -> None:
        """The store was rolled back: it may have lost the batch that was assembled."""
        self._built = None
        self.close()

    def close(self) -> None:
        """Estimate nothing more."""
        if self._later is not None:
            self._later.forget()

    async def take(self, *, incarnation: int, step: int, rank: int, world: int) -> BatchShare:
        """One rank's share of the batch of `step`; waits until there is one."""
        if not 0 <= rank < world:
            raise InvalidError(f"rank {rank} of a world of {world}: ranks go from 0 to world - 1")
        self._takers += 1
        try:
            return await self._take(incarnation, step, rank, world)
        finally:
            self._takers -= 1
            if self._takers == 0:  # a disconnected trainer does not wait
                self._waiting_since = None

    async def _take(self, incarnation: int, step: int, rank: int, world: int) -> BatchShare:
        while True:
            event = self._core.ready.event()
            async with self._core.transaction() as state:
                fence(state, incarnation)
                if state.stop:
                    self._waiting_since = None
                    return BatchShare(step=step, stop=state.stop)
                try:
                    fixed = await self._fix(state, incarnation, step, rank)
                except InvalidError as error:  # of a plug-in
                    self.problem = clipped(error.message, self._core.limits.settings.reason_bytes)
                    fixed = None
                groups = [state.groups[name] for name in fixed.groups] if fixed else []
                every = self._core.spec.trainer.publish_every
                again = step == state.step and _publishes_again(state, every)
            if fixed is not None and not self.problem:
                return await self._share(fixed, groups, rank, world)
            if again:
                return BatchShare(step=step, publish_again=True)
            await _wait(event)

    async def _share(
        self, fixed: BatchRecord, groups: Sequence[GroupRecord], rank: int, world: int
    ) -> BatchShare:
        """One rank's share of a batch."""
        try:
            async with self._building:
                if self._built is None or self._built.batch_id != fixed.batch_id:
                    self._built = await self._assemble(fixed, groups)
                return self._built.share(rank, world)
        except IntegrityError:
            if self._core.state.stop:  # cancelled meanwhile: its payloads are gone
                return BatchShare(step=fixed.step, stop=self._core.state.stop)
            raise

    async def _fix(
        self, state: LedgerState, incarnation: int, step: int, rank: int
    ) -> BatchRecord | None:
        if rank and step == state.step + 1 and state.step in state.batches:
            return None  # rank 0 commits for all; the others may ask before it has
        if step != state.step:
            raise StateError(f"TakeBatch of step {step}, but the ledger is at step {state.step}")
        if step in state.batches:
            return state.batches[step]
        chosen = await self._choose(state, step)
        if len(chosen) < self._core.spec.experience.batch_groups:
            if self._waiting_since is None:
                self._waiting_since = self._core.clock.now()
            return None
        if self.problem:  # it would only fail again
            return None
        if (estimated := await self._estimated(chosen, step)) is None:
            return None
        chosen, found = estimated
        wait_s = self.waiting_s
        batch = BatchRecord(
            batch_id=f"{step}-{_digest(chosen)}",
            step=step,
            groups=tuple(g.group_id for g in chosen),
            stats=replace(
                shares.batch_stats(chosen, state, step),
                trainer_wait_s=wait_s,
                **asdict(self._groups.losses.beside(chosen)),
            ),
            notes=found.notes,
            age_steps=state.age_steps(
                chosen, max_staleness=self._core.spec.experience.max_staleness
            ),
        )
        await self._core.change(
            "take",
            incarnation,
            step,
            record_text(batch),
            *found.script_arguments,
            json.dumps(self._groups.settled(unfixed=state.unfixed_step(step + 1))),
        )
        await self._groups.free(())  # what has left the pool
        self._groups.losses.reset()
        self._core.learned(found.memory)
        self._waited_s, self._waiting_since = self._waited_s + wait_s, None
        state.batches[step] = batch
        return batch

    async def _estimated(
        self, chosen: list[GroupRecord], step: int
    ) -> tuple[list[GroupRecord], FixedEstimate] | None:
        """The groups of a batch and their advantages; None: these are being made."""
        if self._later is not None:
            return await self._later.of(chosen, step, self._core.state)
        inputs = await self._estimator.gather(chosen, step, payloads=self._payloads)
        return chosen, await self._estimator.compute(inputs)

    async def _choose(self, state: LedgerState, step: int) -> list[GroupRecord]:
        """The ready groups with the oldest tokens, then the oldest tasks; drops stale ones.

        The order of completion does not matter, so equal tokens make equal batches.
        """
        spec = self._core.spec.experience
        stale = stale_groups(state, state.ready, step=step, max_staleness=spec.max_staleness)
        await self._groups.drop(stale, DropReason.STALE)
        groups = [state.groups[name] for name in state.ready]
        usable = [(-state.staleness(g, step), g.seq, g.group_id) for g in groups]
        if len(usable) < spec.batch_groups:
            return []
        return [state.groups[name] for _, _, name in sorted(usable)[: spec.batch_groups]]

    async def _assemble(self, fixed: BatchRecord, groups: Sequence[GroupRecord]) -> Batch:
        blobs = await self._payloads.get([name for g in groups for name in g.member_payloads()])
        places = [(g.group_id, index) for g in groups for index in g.member_indices()]
        spans = [self._core.traces.span(*place) for place in places]
        values, weights = await self._estimator.kept(fixed.step, groups)
        names = (name for g in groups for name in g.member_payloads())
        self._advantages = dict(zip(names, map(_mean_note, values), strict=True))
        mask = self._core.spec.sampling.on_truncation == "mask"
        samples: list[shares.BatchSample] = []
        for number, (blob, place, own, weight, span) in enumerate(
            zip(blobs, places, values, weights, spans, strict=True)
        ):
            samples.extend(
                shares.train_samples(
                    blob,
                    own,
                    place=place,
                    weight=weight,
                    mask_truncated=mask,
                    trace=span.sent,
                    first_row=len(samples),
                )
            )
            if number % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
        for span in spans:
            span.set(batch=fixed.batch_id, step=fixed.step)
            span.past("assemble", span.start_ns)
        return Batch(
            batch_id=fixed.batch_id,
            step=fixed.step,
            samples=tuple(samples),
            stats=fixed.stats,
            age_steps=fixed.age_steps,
        )

    async def commit(
        self, *, incarnation: int, step: int, batch_id: str, describe: Describe
    ) -> tuple[int, dict[str, Any] | None]:
        """Commit a trained step; returns the ledger's step and the values of its history row.

        Step and row are written atomically. None instead of values if the step was committed
        before or the job is about to end.
        """
        async with self._core.transaction() as state:
            fence(state, incarnation)
            if state.closed:
                return state.step, None
            batch = state.batches.get(step)
            names = batch.groups if batch else ()
            groups = [state.groups[name] for name in names if name in state.groups]
            ring = [p for g in groups for p in g.payloads()]
            tally = _tally(batch)
            stats = {**batch.notes, **asdict(batch.stats)} if batch else {}
            values = describe(stats, _trained(state.counts, groups, tally))
            row = row_text(step=step + 1, kind="train", values=values)
            self._core.rows_written += 1
            if self._built is not None and self._built.batch_id == batch_id:
                own = {name: self._advantages[name] for name in ring if name in self._advantages}
                await self._groups.samples.note(own)
            answer = await self._core.change(
                "commit", incarnation, step, batch_id, json.dumps(ring), json.dumps(tally), row
            )
            if answer["again"]:
                return state.step, None
            assert batch is not None  # the script refuses a step without one
            state.batches[step] = replace(batch, committed=True, counted=True)
        self._core.work.fire()
        self._core.ready.fire()
        return state.step, values

    async def checkpoints(self, *, incarnation: int) -> Mapping[int, str]:
        """Digests of the checkpoints that were committed and can be rewound to, by step."""
        async with self._core.transaction() as state:
            fence(state, incarnation)
            return {k: v for k, v in state.meta.checkpoints.items() if k >= state.meta.durable}

    async def commit_checkpoint(
        self, *, incarnation: int, step: int, path: str, kept: Sequence[int] = (), digest: str = ""
    ) -> tuple[int, ...]:
        """Steps below the oldest kept checkpoint are durable: their payloads can be deleted.

        Returns the steps of checkpoints that stay beside the newest ones.
        """
        async with self._core.transaction() as state:
            ended = state.stop is StopReason.CANCELLED or state.meta.done
            oldest = step if ended else min([step, *kept])
            # What is on the storage but was never committed must not get a record here.
            stay = retained(state, self._core.spec, step)
            steps = {*kept, *stay}
            known = {k: v for k, v in state.meta.checkpoints.items() if k in steps}
            known[step] = digest
            await self._make_durable(incarnation, step, path, oldest=oldest, known=known)
            self._core.meter.checkpointed()
        self._core.work.fire()
        return stay

    async def release(self) -> bool:
        """Go back to none but the newest checkpoint; returns whether that freed anything."""
        async with self._core.transaction() as state:
            meta = state.meta
            if meta.checkpoint_step <= meta.durable:
                return False
            step = meta.checkpoint_step
            known = dict(meta.checkpoints)  # they are still there, to be exported or forked
            await self._make_durable(
                meta.incarnation, step, meta.checkpoint, oldest=step, known=known
            )
        self._core.work.fire()
        return True

    async def _make_durable(
        self, incarnation: int, step: int, path: str, *, oldest: int, known: dict[int, str]
    ) -> None:
        """Inside a transaction: `step` is saved, and no step before `oldest` is trained again.

        `known` are the digests of the checkpoints that can be loaded, by step.
        """
        state = self._core.state
        texts = field_texts(checkpoints=known)
        await self._core.change(
            "commit_checkpoint", incarnation, step, path, oldest, texts["checkpoints"]
        )
        for done in [k for k in state.batches if k < oldest]:
            del state.batches[done]
        await self.trim(self._core.spec.experience.keep_trajectories)

    async def trim(self, keep: int) -> None:
        """Inside a transaction: delete durable trajectories, all but the newest `keep`.

        Those that are not exported yet are kept too, while half of `payload_bytes` is free.
        """
        store, ring = self._core.store, self._core.keys.ring
        if self._groups.payload_bytes <= self._core.spec.experience.payload_bytes / 2:
            exported = self._core.state.meta.exported.offset
            keep = max(keep, await store.command("ZCOUNT", ring, f"({exported}", "+inf"))
        found = await store.scored("ZRANGE", ring, 0, -keep - 1)
        live = self._core.state.groups
        gone = {name: step_of(score) for name, score in found if name.rsplit("/", 2)[0] not in live}
        if gone:
            await note_dropped(self._core, [*gone])
            await store.command("ZREM", ring, *gone)
        await self._groups.free([*gone], trained=gone)

    async def rewind(self, *, incarnation: int, step: int) -> tuple[int, int]:
        """Go back to a checkpoint; returns the ledger's step and the newest version."""
        async with self._core.transaction() as state:
            fence(state, incarnation)
            if state.closed:
                raise StateError("the job is about to end: nothing is trained again")
            await self._core.change("rewind", incarnation, step)
            self._core.invalidate()
            self._built, self._waiting_since = None, None
            self.close()
        self._core.ready.fire()
        return step, state.version


def _digest(groups: Sequence[GroupRecord]) -> str:
    """A hash of the content, so that a batch lost by the store differs from its replacement."""
    names = "\n".join(name for group in groups for name in group.member_payloads())
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def _publishes_again(state: LedgerState, publish_every: int) -> bool:
    """Whether a trainer that would wait for a batch is to publish its weights again.

    Not if it does so anyway: after a step, or as it has just started.
    """
    newest = state.versions.get(state.version)
    if newest is None or newest.version not in state.meta.withdrawn:
        return False
    due = newest.step != state.step and state.step % publish_every == 0
    return not due and newest.incarnation == state.meta.incarnation


def fence(state: LedgerState, incarnation: int) -> None:
    """Refuse an incarnation that is not the newest."""
    newest = state.meta.incarnation
    if incarnation != newest:
        raise FencedError(f"incarnation {incarnation} is not the newest, which is {newest}")


def _mean_note(advantages: NDArray[np.float32]) -> PayloadNote:
    """What users are told of an episode's advantages: their mean."""
    if not len(advantages):
        return PayloadNote()
    # Most have one for all of their tokens, for which numpy's mean takes far longer.
    mean = advantages[0] if len(advantages) == 1 else advantages.mean()
    return PayloadNote(advantage=repr(float(mean)))


def _tally(batch: BatchRecord | None) -> dict[str, int]:
    """What a batch adds to the counters: once, however often its step is trained."""
    if batch is None or batch.counted:
        return {}
    found = {f"stale:{age}": count for age, count in batch.stats.staleness.items()}
    if batch.stats.replayed:
        found["replayed"] = batch.stats.replayed
    return {**found, "trained_tokens": batch.stats.batch_tokens}


def _trained(
    counts: Counter[str], groups: Sequence[GroupRecord], tally: Mapping[str, int]
) -> Counter[str]:
    """The counters as they will be when these groups are trained."""
    after = Counter(counts)
    episodes = sum(len(group.remaining) for group in groups)
    after.update({**tally, "taken": -episodes, "trained": episodes})
    return after


async def _wait(event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(_POLL_S):
            await event.wait()
    except TimeoutError:
        return
