"""Fixes the batch of each step, hands it out, and follows the trainer's steps."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline import plugins
from paceline.errors import FencedError, IntegrityError, InvalidError, StateError
from paceline.text import clipped
from paceline.types import DropReason
from paceline_experience import shares
from paceline_experience.book import Book, Group
from paceline_experience.core import Core
from paceline_experience.groups import Groups
from paceline_experience.history import row_text
from paceline_experience.payloads import PayloadStore
from paceline_experience.shares import Batch, BatchShare
from paceline_experience.trajectories import exported_of, note_dropped

_POLL_S = 1.0
_YIELD_EVERY = 64
# The values of a step's row, of its batch's statistics and the counters after it.
Describe = Callable[[Mapping[str, Any], Counter[str]], dict[str, Any]]


class Batches:
    """The side of the ledger that the trainer sees."""

    def __init__(self, *, core: Core, groups: Groups, payloads: PayloadStore) -> None:
        self._core = core
        self._groups = groups
        self._payloads = payloads
        self._advantage = plugins.find("advantages", core.spec.experience.advantage.kind)
        self._built: Batch | None = None
        self._building = asyncio.Lock()
        self._takers = 0
        self._since: float | None = None
        self._waited_s = 0.0
        self.problem = ""  # of the advantage: no batch can be made, and the job ends with it

    @property
    def waiting(self) -> bool:
        """Whether the trainer waits for a batch."""
        return self._since is not None

    @property
    def waiting_s(self) -> float:
        """How long the trainer has been waiting for its present batch."""
        return 0.0 if self._since is None else self._core.clock.now() - self._since

    @property
    def waited_s(self) -> float:
        """All waits so far, with the present one."""
        return self._waited_s + self.waiting_s

    def forget(self) -> None:
        """The store has gone back: what was made of a batch may be of one that it has lost."""
        self._built = None

    async def take(self, *, incarnation: int, step: int, rank: int, world: int) -> BatchShare:
        """One rank's part of the batch of `step`; waits until there is one."""
        if not 0 <= rank < world:
            raise InvalidError(f"rank {rank} of a world of {world}: ranks go from 0 to world - 1")
        self._takers += 1
        try:
            return await self._take(incarnation, step, rank, world)
        finally:
            self._takers -= 1
            if self._takers == 0:  # a trainer that went away does not wait
                self._since = None

    async def _take(self, incarnation: int, step: int, rank: int, world: int) -> BatchShare:
        while True:
            event = self._core.ready.event()
            async with self._core.transaction() as book:
                fence(book, incarnation)
                if book.stop:
                    self._since = None
                    return BatchShare(step=step, stop=book.stop)
                fixed = await self._fix(book, incarnation, step, rank)
                names: list[str] = fixed["groups"] if fixed else []
                groups = [book.groups[name] for name in names]
            if fixed is not None and not self.problem:
                try:
                    return await self._share(fixed, groups, rank, world)
                except InvalidError as error:
                    self.problem = clipped(error.message, self._core.limits.settings.reason_bytes)
            await _wait(event)

    async def _share(
        self, fixed: dict[str, Any], groups: Sequence[Group], rank: int, world: int
    ) -> BatchShare:
        """One rank's part of a batch.

        Raises:
            InvalidError: the advantage has failed on it.
        """
        try:
            async with self._building:
                if self._built is None or self._built.batch_id != fixed["id"]:
                    self._built = await self._assemble(fixed, groups)
                return self._built.share(rank, world)
        except IntegrityError:
            if self._core.book.stop:  # cancelled in between: its payloads are gone
                return BatchShare(step=fixed["step"], stop=self._core.book.stop)
            raise

    async def _fix(
        self, book: Book, incarnation: int, step: int, rank: int
    ) -> dict[str, Any] | None:
        if rank and step == book.step + 1 and book.step in book.batches:
            return None  # rank 0 commits for all; the others may ask before it has
        if step != book.step:
            raise StateError(f"TakeBatch of step {step}, but the ledger is at step {book.step}")
        if step in book.batches:
            return book.batches[step]
        chosen = await self._choose(book, step)
        if len(chosen) < self._core.spec.experience.batch_groups:
            if self._since is None:
                self._since = self._core.clock.now()
            return None
        wait_s = self.waiting_s
        batch: dict[str, Any] = {
            "id": f"{step}-{_digest(chosen)}",
            "step": step,
            "groups": [g.group_id for g in chosen],
            "stats": {**shares.batch_stats(chosen, book, step), "trainer_wait_s": wait_s},
            "committed": 0,
        }
        await self._core.change("take", incarnation, step, json.dumps(batch))
        self._waited_s, self._since = self._waited_s + wait_s, None
        book.batches[step] = batch
        return batch

    async def _choose(self, book: Book, step: int) -> list[Group]:
        """The ready groups with the oldest tokens, else the oldest tasks; too old ones are dropped.

        Who finished first does not matter: equal tokens make equal batches.
        """
        spec = self._core.spec.experience
        aged = [(book.staleness(book.groups[name], step), name) for name in book.ready]
        late = [name for age, name in aged if age > spec.max_staleness]
        await self._groups.drop(late, DropReason.STALE)
        usable = [(-age, book.groups[n].seq, n) for age, n in aged if n in book.groups]
        if len(usable) < spec.batch_groups:
            return []
        return [book.groups[name] for _, _, name in sorted(usable)[: spec.batch_groups]]

    async def _assemble(self, fixed: dict[str, Any], groups: Sequence[Group]) -> Batch:
        blobs = await self._payloads.get([name for g in groups for name in g.payloads()])
        spans = [self._core.traces.span(g.group_id, i) for g in groups for i in g.finished()]
        values = shares.advantages(groups, self._advantage, self._core.spec.experience.advantage)
        mask = self._core.spec.sampling.truncated == "mask"
        samples: list[tuple[bytes, int, int]] = []
        for number, (blob, value, span) in enumerate(zip(blobs, values, spans, strict=True)):
            trace = span.sent
            samples.extend(shares.train_samples(blob, value, mask_truncated=mask, trace=trace))
            if number % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
        for span in spans:
            span.set(batch=fixed["id"], step=fixed["step"])
            span.past("assemble", span.start_ns)
        return Batch(
            batch_id=fixed["id"],
            step=fixed["step"],
            samples=tuple(data for data, _, _ in samples),
            costs=tuple(tokens for _, tokens, _ in samples),
            total_sequences=sum(trainable > 0 for _, _, trainable in samples),
            total_tokens=sum(trainable for _, _, trainable in samples),
            stats=fixed["stats"],
        )

    async def commit(
        self, *, incarnation: int, step: int, batch_id: str, describe: Describe
    ) -> tuple[int, dict[str, Any] | None]:
        """The step is trained: the ledger's step, and the values of its row in the history.

        The row is kept together with the step: there is never one without the other. None
        instead of values if the step was committed before or the job is about to end.
        """
        async with self._core.transaction() as book:
            fence(book, incarnation)
            if book.closed:
                return book.step, None
            batch = book.batches.get(step, {})
            groups = [book.groups[n] for n in batch.get("groups", ()) if n in book.groups]
            ring = [p for g in groups for p in g.payloads()]
            tally = _tally(batch)
            values = describe(batch.get("stats", {}), _trained(book.counts, groups, tally))
            row = row_text(step=step + 1, kind="train", values=values)
            self._core.rows_written += 1
            answer = await self._core.change(
                "commit", incarnation, step, batch_id, json.dumps(ring), json.dumps(tally), row
            )
            if answer["again"]:
                return book.step, None
            batch["committed"] = batch["counted"] = 1
        self._core.work.fire()
        self._core.ready.fire()
        return book.step, values

    async def checkpointed(
        self, *, incarnation: int, step: int, path: str, kept: Sequence[int] = ()
    ) -> None:
        """Steps below the oldest kept checkpoint are durable: their payloads may go."""
        async with self._core.transaction() as book:
            over = book.stop == "cancelled" or bool(book.meta.get("done"))
            oldest = step if over else min([step, *kept])
            await self._durable(incarnation, step, path, oldest=oldest)
            self._core.meter.saved()
        self._core.work.fire()

    async def release(self) -> bool:
        """Keep nothing for checkpoints that are older than the newest; whether anything went."""
        async with self._core.transaction() as book:
            step = book.number("checkpoint_step")
            if step <= book.number("durable"):
                return False
            path = book.meta.get("checkpoint", "")
            await self._durable(book.number("incarnation"), step, path, oldest=step)
        self._core.work.fire()
        return True

    async def _durable(self, incarnation: int, step: int, path: str, *, oldest: int) -> None:
        """Inside a transaction: `step` is saved, and nothing before `oldest` is trained again."""
        book = self._core.book
        await self._core.change("checkpointed", incarnation, step, path, oldest)
        for done in [k for k in book.batches if k < oldest]:
            del book.batches[done]
        await self.trim(self._core.spec.experience.keep_trajectories)

    async def trim(self, keep: int) -> None:
        """Inside a transaction: of durable trajectories keep only the newest ones.

        And those that are not exported yet, while at least half of `payload_bytes` is free.
        """
        store, ring = self._core.store, self._core.keys.ring
        if self._groups.payload_bytes <= self._core.spec.experience.payload_bytes / 2:
            exported = exported_of(self._core.book).offset
            keep = max(keep, await store.command("ZCOUNT", ring, f"({exported}", "+inf"))
        names: list[bytes] = await store.command("ZRANGE", ring, 0, -keep - 1)
        live = self._core.book.groups
        gone = [n for n in (b.decode() for b in names) if n.rsplit("/", 2)[0] not in live]
        if gone:
            await note_dropped(self._core, gone)
            await store.command("ZREM", ring, *gone)
            await self._groups.free(gone)

    async def rewind(self, *, incarnation: int, step: int) -> tuple[int, int]:
        """Back to a checkpoint: the ledger's step and the newest version."""
        async with self._core.transaction() as book:
            fence(book, incarnation)
            if book.closed:
                raise StateError("the job is about to end: nothing is trained again")
            fed = await self._fed_at(step)
            await self._core.change("rewind", incarnation, step)
            if fed:
                self._core.feed.rewind(fed)
                await self._core.note(feed=self._core.feed.state())
            self._core.invalidate()
            self._built, self._since = None, None
        self._core.ready.fire()
        return step, book.version

    async def _fed_at(self, step: int) -> str:
        key = self._core.keys.samplers
        found: bytes | None = await self._core.store.command("HGET", key, step)
        return found.decode() if found else ""


def _digest(groups: Sequence[Group]) -> str:
    """Of what is in a batch: one that the store has lost is not taken for the one made instead."""
    names = "\n".join(name for group in groups for name in group.payloads())
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def fence(book: Book, incarnation: int) -> None:
    """Refuse an incarnation that is not the newest."""
    newest = book.number("incarnation")
    if incarnation != newest:
        raise FencedError(f"incarnation {incarnation} is not the newest, which is {newest}")


def _tally(batch: dict[str, Any]) -> dict[str, int]:
    """What a batch adds to the counters, once, however often its step is trained."""
    if batch.get("counted"):
        return {}
    stats = batch.get("stats", {})
    found = {f"stale:{age}": int(n) for age, n in stats.get("staleness", {}).items()}
    return {**found, "trained_tokens": int(stats.get("batch_tokens", 0))}


def _trained(
    counts: Counter[str], groups: Sequence[Group], tally: Mapping[str, int]
) -> Counter[str]:
    """The counters as they are once these groups are trained."""
    after = Counter(counts)
    episodes = sum(len(group.states) for group in groups)
    after.update({**tally, "taken": -episodes, "trained": episodes})
    return after


async def _wait(event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(_POLL_S):
            await event.wait()
    except TimeoutError:
        return
