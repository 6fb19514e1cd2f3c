"""Stored episodes of a job, and who still needs their payloads. It mirrors a hash of the store."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from paceline.config import JobSpec
from paceline.plugins import Stored, registry
from paceline_experience.ledger.records import (
    EpisodeSummary,
    parse_record,
    record_text,
)

Place = tuple[int, int]  # seq and index
_RECORD_BYTES = 512  # what an entry costs beside its payload, at most as a rule


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """An episode in the pool, or a guest of a group."""

    task: int  # position in the task source
    seq: int  # of its group, in the order of admission
    index: int  # in its group
    step: int  # of the next batch to be fixed when its group was decided
    payload: str  # name of its payload
    world: str  # digest of what has to be equal for it to be worth something
    result: EpisodeSummary

    @property
    def key(self) -> str:
        """Its field in the store; equal if its group is generated again."""
        return f"{self.seq}/{self.index}"

    @property
    def place(self) -> Place:
        """Its place in the order of draws."""
        return (self.seq, self.index)

    @property
    def num_bytes(self) -> int:
        """What it takes of the pool's budget."""
        return self.result.num_bytes + _RECORD_BYTES

    def stored(self) -> Stored:
        """As plug-ins see it."""
        found = self.result
        return Stored(
            reward=found.reward,
            step=self.step,
            answer=found.answer,
            length=found.policy_tokens,
            truncated=found.truncated,
            parts=found.parts,
        )


@dataclass(slots=True)
class PoolChange:
    """What a script writes: texts of new entries, and keys of those that leave."""

    stored: dict[str, str] = field(default_factory=dict[str, str])
    evicted: list[str] = field(default_factory=list[str])

    def evict(self, records: Iterable[StoredRecord], lost: set[str]) -> None:
        """These leave; their payloads are added to `lost`."""
        for record in records:
            lost.add(record.payload)
            self.stored.pop(record.key, None)
            self.evicted.append(record.key)


class Pool:
    """Bounded per task and in total; the oldest leave first, in the order of draws.

    An episode is *recent* until the batch is fixed for which its group was decided, and offered to
    nobody, and takes no other's place, before. So what a group is offered depends on the batches
    before its own, not on which groups were decided first; the bounds hold for recent ones apart.
    """

    def __init__(self, texts: Mapping[bytes, bytes] | None = None, *, unfixed: int = 0) -> None:
        """`unfixed`: the step of the next batch that is fixed."""
        self._recent, self._settled = _Shelf(), _Shelf()
        for text in (texts or {}).values():
            record = parse_record(StoredRecord, text)
            (self._recent if record.step >= unfixed else self._settled).add(record)

    def __len__(self) -> int:
        return len(self._recent) + len(self._settled)

    @property
    def payloads(self) -> set[str]:
        """Names of the payloads of all entries."""
        return self._recent.payloads | self._settled.payloads

    def sizes(self) -> Iterable[tuple[int, int]]:
        """Bytes, and most entries of a task, of those that are settled and those that are not."""
        return ((each.num_bytes, each.most_of_a_task()) for each in (self._settled, self._recent))

    def records(self) -> Iterable[StoredRecord]:
        """All entries, the oldest first, recent ones last."""
        return (*self._settled.records(), *self._recent.records())

    def needs(self, payload: str) -> bool:
        """Whether a payload is that of an entry."""
        return payload in self._settled.payloads or payload in self._recent.payloads

    def of(self, task: int, *, before: int, world: str) -> list[StoredRecord]:
        """Settled entries of a task from draws before `before`, the oldest first."""
        found = self._settled.of(task, before=before)
        return [each for each in found if each.world == world]

    def put(
        self, records: Iterable[StoredRecord], *, per_task: int, max_bytes: int
    ) -> tuple[PoolChange, set[str]]:
        """Add entries, and evict what is too much; returns the change and lost payloads."""
        return self._added(self._recent, records, per_task=per_task, max_bytes=max_bytes)

    def bring(
        self, records: Iterable[StoredRecord], *, per_task: int, max_bytes: int
    ) -> tuple[PoolChange, set[str]]:
        """The same for entries that are offered at once."""
        return self._added(self._settled, records, per_task=per_task, max_bytes=max_bytes)

    def _added(
        self, to: _Shelf, records: Iterable[StoredRecord], *, per_task: int, max_bytes: int
    ) -> tuple[PoolChange, set[str]]:
        change, lost = PoolChange(), set[str]()
        for record in records:
            for shelf in (self._settled, self._recent):
                if before := shelf.pop(record.place):
                    lost.add(before.payload)
            to.add(record)
            change.stored[record.key] = record_text(record)
        change.evict(to.bounded(per_task=per_task, max_bytes=max_bytes), lost)
        return change, {name for name in lost if not self.needs(name)}

    def settle(self, *, unfixed: int, per_task: int, max_bytes: int) -> tuple[PoolChange, set[str]]:
        """A batch is fixed, `unfixed` comes next; returns the change and lost payloads."""
        change, lost = PoolChange(), set[str]()
        for record in self._recent.records():
            if record.step < unfixed:
                self._recent.pop(record.place)
                self._settled.add(record)
        change.evict(self._settled.bounded(per_task=per_task, max_bytes=max_bytes), lost)
        return change, lost

    def take_back(self, draws: Collection[int]) -> tuple[PoolChange, set[str]]:
        """Evict recent entries of draws whose groups are generated again."""
        change, lost = PoolChange(), set[str]()
        gone = [record for record in self._recent.records() if record.seq in draws]
        change.evict([self._recent.pop(record.place) or record for record in gone], lost)
        return change, lost

    def clear(self) -> tuple[PoolChange, set[str]]:
        """Evict everything."""
        change, lost = PoolChange(), set[str]()
        change.evict(self.records(), lost)
        self._recent, self._settled = _Shelf(), _Shelf()
        return change, lost


class _Shelf:
    """Entries in the order of draws."""

    def __init__(self) -> None:
        self._entries: dict[Place, StoredRecord] = {}
        self._order: list[Place] = []
        self._by_task: dict[int, list[Place]] = {}
        self.payloads: set[str] = set()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def records(self) -> list[StoredRecord]:
        return [self._entries[place] for place in self._order]

    def most_of_a_task(self) -> int:
        return max(map(len, self._by_task.values()), default=0)

    def of(self, task: int, *, before: int) -> list[StoredRecord]:
        places = self._by_task.get(task, [])
        return [self._entries[p] for p in places[: bisect_left(places, (before, -1))]]

    def add(self, record: StoredRecord) -> None:
        place = record.place
        self._entries[place] = record
        insort(self._order, place)
        insort(self._by_task.setdefault(record.task, []), place)
        self.payloads.add(record.payload)
        self.num_bytes += record.num_bytes

    def pop(self, place: Place) -> StoredRecord | None:
        record = self._entries.pop(place, None)
        if record is None:
            return None
        del self._order[bisect_left(self._order, place)]
        own = self._by_task[record.task]
        own.remove(place)
        if not own:
            del self._by_task[record.task]
        self.payloads.discard(record.payload)
        self.num_bytes -= record.num_bytes
        return record

    def bounded(self, *, per_task: int, max_bytes: int) -> list[StoredRecord]:
        """Remove what is too much, the oldest first; returns it."""
        full = [own for own in self._by_task.values() if len(own) > per_task]
        many = [place for own in full for place in own[: len(own) - per_task]]
        gone = [found for place in many if (found := self.pop(place))]
        while self.num_bytes > max_bytes and (found := self.pop(self._order[0])):
            gone.append(found)
        return gone


def world_digest(spec: JobSpec) -> str:
    """A digest of what rewards of a task depend on: another environment offers no old success."""
    tasks = spec.tasks
    name = tasks.environment
    plugin = registry.get("environments", name)
    release = plugin.point.dist.version if plugin and plugin.point.dist else ""
    about: dict[str, object] = {
        "environment": [name, release, tasks.options, tasks.seed],
        "code": spec.code.digest if spec.code is not None else "",
        "reward": [each.model_dump(mode="json") for each in spec.reward],
        "topology": spec.sampling.topology.model_dump(mode="json"),
    }
    if tasks.source is not None:
        about["source"] = tasks.source.model_dump(mode="json")
    if spec.data is not None:
        about["data"] = spec.data.digest
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
