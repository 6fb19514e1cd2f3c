"""Stored episodes of a job, and who still needs their payloads. It mirrors a hash of the store."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.config import JobSpec
from paceline.plugins import Stored, registry
from paceline_experience.ledger.records import (
    EpisodeSummary,
    parse_record,
    record_text,
)

_RECORD_BYTES = 512  # what an entry costs beside its payload, at most as a rule


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """An episode in the pool, or a guest of a group."""

    task: int  # position in the task source
    seq: int  # of its group, in the order of admission
    index: int  # in its group
    step: int  # of the trainer when its group was decided
    payload: str  # name of its payload
    world: str  # digest of what has to be equal for it to be worth something
    result: EpisodeSummary

    @property
    def key(self) -> str:
        """Its field in the store; equal if its group is generated again."""
        return f"{self.seq}/{self.index}"

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


Place = tuple[int, int]  # seq and index


@dataclass(slots=True)
class PoolChange:
    """What a script writes: texts of new entries, and keys of those that leave."""

    stored: dict[str, str] = field(default_factory=dict[str, str])
    evicted: list[str] = field(default_factory=list[str])


class Pool:
    """Bounded per task and in total; the oldest leave first, in the order of draws.

    So what it holds depends on which groups were decided, not on which was decided first.
    """

    def __init__(self, texts: Mapping[bytes, bytes] | None = None) -> None:
        self._entries: dict[Place, StoredRecord] = {}
        self._order: list[Place] = []
        self._by_task: dict[int, list[Place]] = {}
        self.payloads: set[str] = set()
        self.num_bytes = 0
        for text in (texts or {}).values():
            self._add(parse_record(StoredRecord, text))

    def __len__(self) -> int:
        return len(self._entries)

    def records(self) -> Iterable[StoredRecord]:
        """All entries, the oldest first."""
        return (self._entries[place] for place in self._order)

    def holds(self, record: StoredRecord) -> bool:
        """Whether this very episode is still there."""
        return record.payload in self.payloads

    def of(self, task: int, *, before: int, world: str) -> list[StoredRecord]:
        """Entries of a task from draws before `before`, the oldest first."""
        places = self._by_task.get(task, [])
        found = (self._entries[p] for p in places[: bisect_left(places, (before, -1))])
        return [each for each in found if each.world == world]

    def put(
        self, records: Iterable[StoredRecord], *, per_task: int, max_bytes: int
    ) -> tuple[PoolChange, set[str]]:
        """Add entries, and evict what is too much; returns the change and lost payloads."""
        change, lost = PoolChange(), set[str]()
        for record in records:
            if before := self._entries.get((record.seq, record.index)):
                self._remove(before)
                lost.add(before.payload)
            self._add(record)
            change.stored[record.key] = record_text(record)
            own = self._by_task[record.task]
            if len(own) > per_task:
                self._evict(own[0], change, lost)
        while self.num_bytes > max_bytes:
            self._evict(self._order[0], change, lost)
        return change, lost - self.payloads

    def clear(self) -> tuple[PoolChange, set[str]]:
        """Evict everything."""
        change, lost = PoolChange(), set[str]()
        while self._order:
            self._evict(self._order[-1], change, lost)
        return change, lost

    def _evict(self, place: Place, change: PoolChange, lost: set[str]) -> None:
        record = self._entries[place]
        self._remove(record)
        lost.add(record.payload)
        change.stored.pop(record.key, None)
        change.evicted.append(record.key)

    def _add(self, record: StoredRecord) -> None:
        place = (record.seq, record.index)
        self._entries[place] = record
        insort(self._order, place)
        insort(self._by_task.setdefault(record.task, []), place)
        self.payloads.add(record.payload)
        self.num_bytes += record.num_bytes

    def _remove(self, record: StoredRecord) -> None:
        place = (record.seq, record.index)
        del self._entries[place]
        del self._order[bisect_left(self._order, place)]
        own = self._by_task[record.task]
        own.remove(place)
        if not own:
            del self._by_task[record.task]
        self.payloads.discard(record.payload)
        self.num_bytes -= record.num_bytes


def world_digest(spec: JobSpec) -> str:
    """A digest of what rewards of a task depend on: another environment offers no old success."""
    tasks = spec.tasks
    name = tasks.environment
    point = registry.installed("environments").get(name)
    release = point.dist.version if point is not None and point.dist is not None else ""
    about = {
        "environment": [name, release, tasks.options, tasks.seed],
        "code": spec.code.digest if spec.code is not None else "",
        "reward": [each.model_dump(mode="json") for each in spec.reward],
        "topology": spec.sampling.topology.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
