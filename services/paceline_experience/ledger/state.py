"""The job's state in memory: a copy of what Redis holds, updated by every script's answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.enums import EpisodeState, StopReason
from paceline_experience.ledger.records import (
    BatchRecord,
    EpisodeSummary,
    LedgerMeta,
    Publication,
    parse_record,
)
from paceline_experience.ledger.replay.pool import Pool, StoredRecord
from paceline_experience.store.letters import LETTERS

DROPPED = LETTERS[EpisodeState.DROPPED]
_WITHOUT_RESULT = "ql" + DROPPED
_GUESTS = tuple[StoredRecord, ...]


@dataclass(slots=True)
class GroupRecord:
    """A group; `states` has a letter per episode (see `LETTERS`).

    Of a group that is kept, those that the filters have left out are dropped and have no result.
    """

    group_id: str
    seq: int
    position: int
    states: str
    attempts: list[int]
    workers: list[str]
    results: Sequence[EpisodeSummary | None]  # of finished episodes that are not dropped
    num_requeues: int  # how often its task was admitted before
    version: int  # pinned, of an eval group; -1: training
    deadlines: list[float]
    oldest_seen: int = -1  # oldest version in the progress of its episodes
    accepted: bool = False  # it has been ready
    batch: int = -1  # step whose batch contains it
    sampled: dict[int, int] = field(default_factory=dict[int, int])
    """Policy tokens in the progress of its episodes, since this process has opened the ledger."""
    pick: str = ""  # variant and meta of the sampler's pick, as JSON
    starts: str = ""  # what an allocator said of its episodes, as JSON; empty: nothing special
    waves: int = 1  # begun so far
    closed: bool = False  # its allocator has had enough, but filters have not decided yet
    repairs: int = 0  # how often filters had episodes of it generated again
    guests: tuple[StoredRecord, ...] = ()  # stored episodes that are trained with it
    seen: bool = False  # plug-ins with a memory have observed it, or an earlier group of its task

    @property
    def is_eval(self) -> bool:
        """Whether it is measured, not trained."""
        return self.version >= 0

    @property
    def complete(self) -> bool:
        """Whether all episodes are over, some are finished, and it is not decided on yet."""
        return "f" in self.states and not self.states.strip("f" + DROPPED)

    @property
    def remaining(self) -> str:
        """The states of all episodes that are not dropped."""
        return self.states.replace(DROPPED, "")

    def summaries(self) -> list[EpisodeSummary]:
        """Summaries of all finished episodes that are not dropped, in order."""
        return [found for found in self.results if found is not None]

    def oldest_version(self) -> int:
        """Oldest policy version known to have sampled its tokens; -1: none is known."""
        known = [f.oldest_version for f in self.summaries() if f.oldest_version >= 0]
        if self.oldest_seen >= 0:
            known.append(self.oldest_seen)
        return min(known, default=-1)

    def finished(self) -> list[int]:
        """Indices of the episodes that have a payload, in order."""
        return [index for index, found in enumerate(self.results) if found is not None]

    def without(self, indices: Collection[int]) -> GroupRecord:
        """The group as if these finished episodes were still open."""
        if not indices:
            return self
        results = [None if i in indices else found for i, found in enumerate(self.results)]
        states = "".join("l" if i in indices else s for i, s in enumerate(self.states))
        return replace(self, results=results, states=states)

    def follows(self, earlier: GroupRecord) -> bool:
        """Whether all that was finished of an earlier record still is, and no wave came since."""
        was = earlier.payload_names().items()
        names = self.payload_names()
        same = all(names.get(index) == name for index, name in was)
        return same and len(self.states) == len(earlier.states)

    def payload_names(self) -> dict[int, str]:
        """Names of its payloads by index, in order."""
        return {
            index: payload_name(self.group_id, index, found.attempt)
            for index, found in enumerate(self.results)
            if found is not None
        }

    def payloads(self) -> list[str]:
        """Names of its payloads, in order."""
        return [*self.payload_names().values()]

    def members(self) -> list[EpisodeSummary]:
        """Summaries of what is trained of it: its own episodes in order, then its guests."""
        return [*self.summaries(), *(each.result for each in self.guests)]

    def member_payloads(self) -> list[str]:
        """Names of the payloads of its members."""
        return [*self.payloads(), *(each.payload for each in self.guests)]

    def member_indices(self) -> list[int]:
        """Indices of its members; those of guests follow those of its own episodes."""
        size = len(self.states)
        return [*self.finished(), *range(size, size + len(self.guests))]


Results = Mapping[str, Mapping[int, EpisodeSummary]]
"""Summaries of finished episodes by group and index."""
Change = tuple[GroupRecord | None, GroupRecord | None]


def payload_name(group_id: str, index: int, attempt: int) -> str:
    """Each attempt has a payload of its own, so that the first to finish wins."""
    return f"{group_id}/{index}/{attempt}"


@dataclass(slots=True)
class LedgerState:
    """Everything that planning needs without asking Redis."""

    groups: dict[str, GroupRecord] = field(default_factory=dict[str, GroupRecord])
    counts: Counter[str] = field(default_factory=Counter[str])
    meta: LedgerMeta = field(default_factory=LedgerMeta)
    revision: int = 0  # grows with every change in the store
    versions: dict[int, Publication] = field(default_factory=dict[int, Publication])
    batches: dict[int, BatchRecord] = field(default_factory=dict[int, BatchRecord])  # by step
    queued: set[str] = field(default_factory=set[str])
    queued_evals: set[str] = field(default_factory=set[str])
    open: set[str] = field(default_factory=set[str])  # training groups that are not ready yet
    ready: set[str] = field(default_factory=set[str])
    evals: set[str] = field(default_factory=set[str])
    held: Counter[str] = field(default_factory=Counter[str])  # leased episodes by worker
    pool: Pool = field(default_factory=Pool)  # of a job with a replay
    pins: Counter[str] = field(default_factory=Counter[str])  # payloads of guests
    unpinned: set[str] = field(default_factory=set[str])  # payloads that may not be needed any more

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.meta.step

    def unfixed_step(self, start: int = 0) -> int:
        """The step of the next batch that is fixed: after a rewind, known ones come again first.

        `start`: the first step that counts, if it is later than the present one.
        """
        step = max(start, self.step)
        while step in self.batches:
            step += 1
        return step

    @property
    def stop(self) -> StopReason | None:
        """Why there will be no further batch; None: there will be one."""
        return StopReason(self.meta.stop) if self.meta.stop else None

    @property
    def closed(self) -> bool:
        """Whether nothing more will be trained."""
        return self.stop is StopReason.CANCELLED or self.meta.closed

    @property
    def version(self) -> int:
        """The newest publication; -1: none."""
        return self.meta.version

    def apply(
        self,
        head: dict[str, Any],
        changed: Iterable[bytes],
        results: Sequence[bytes],
        *,
        deadline: float,
    ) -> list[Change]:
        """Apply what a script changed; new leases last until `deadline`."""
        self.counts.update(head["counts"] or {})
        texts: dict[str, str] = head["meta"] or {}
        self.revision = int(texts.pop("revision", self.revision))
        self.meta = self.meta.changed(texts)
        fields = iter(changed)
        found = parse_results(results[::2], results[1::2])
        return [
            self.put(name.decode(), text, found, deadline=deadline)
            for name, text in zip(fields, fields, strict=True)
        ]

    def put(self, group_id: str, text: bytes, results: Results, *, deadline: float) -> Change:
        """Replace one record (empty: remove it); returns the record before and after."""
        before = self.groups.pop(group_id, None)
        if before is not None:
            self._unlist(before)
        if text:
            self.enter(group_id, text, results, before=before, deadline=deadline)
        return before, self.groups.get(group_id)

    def enter(
        self,
        group_id: str,
        text: bytes,
        results: Results,
        *,
        before: GroupRecord | None,
        deadline: float,
    ) -> None:
        """Add a record; leases that `before` already had keep their deadlines."""
        group = parse_group(group_id, text, results=results, before=before, deadline=deadline)
        self.groups[group_id] = group
        self._list(group)

    def age(self, version: int) -> int:
        """The step from which tokens of a version count their age.

        A version that the store has lost is as old as the newest known one before it.
        """
        if version not in self.versions:
            version = max((known for known in self.versions if known <= version), default=-1)
        found = self.versions.get(version)
        return found.age_step if found else 0

    def age_steps(self, groups: Sequence[GroupRecord], *, max_staleness: int) -> dict[int, int]:
        """`age` of the versions from the oldest of these groups on, and of those of guests.

        No token of an episode is more than `max_staleness` steps newer than its oldest.
        """
        oldest = min((v for g in groups if (v := g.oldest_version()) >= 0), default=None)
        found = set[int]()
        if oldest is not None:
            found = {v for v in (oldest, *self.versions) if v >= oldest}
        for first in {each.result.oldest_version for g in groups for each in g.guests}:
            newest = self.age(first) + max_staleness
            found |= {v for v in (first, *self.versions) if v >= first and self.age(v) <= newest}
        return {v: self.age(v) for v in sorted(found) if v >= 0}

    def staleness(self, group: GroupRecord, step: int) -> int:
        """Age in steps of a group's oldest token if it is trained at `step`."""
        oldest = group.oldest_version()
        return 0 if oldest < 0 else step - self.age(oldest)

    def leased(self) -> Iterable[tuple[GroupRecord, int]]:
        """All leased episodes, as group and index."""
        for group_id in [*self.open, *self.evals]:
            group = self.groups[group_id]
            for index, state in enumerate(group.states):
                if state == "l":
                    yield group, index

    def pinned(self, name: str) -> bool:
        """Whether a payload is needed by the pool, or by a group that it is a guest of."""
        return self.pool.needs(name) or self.pins[name] > 0

    def owns(self, name: str) -> bool:
        """Whether a payload is that of an episode of a live group."""
        group = self.groups.get(name.rsplit("/", 2)[0])
        return group is not None and name in group.payloads()

    def find(self, group_id: str, index: int, attempt: int) -> GroupRecord | None:
        """The group, if this attempt holds the lease on the episode."""
        group = self.groups.get(group_id)
        if group is None or not 0 <= index < len(group.states):
            return None
        holds = group.states[index] == "l" and group.attempts[index] == attempt
        return group if holds else None

    def _list(self, group: GroupRecord) -> None:
        name, states = group.group_id, group.states
        if group.is_eval:
            self.evals.add(name)
        elif "r" in states:
            self.ready.add(name)
        elif not states.strip("qlf" + DROPPED):
            self.open.add(name)
        if "q" in states:
            (self.queued_evals if group.is_eval else self.queued).add(name)
        if group.guests:
            self.pins.update(each.payload for each in group.guests)
        self.held.update(w for w, s in zip(group.workers, states, strict=True) if s == "l")

    def _unlist(self, group: GroupRecord) -> None:
        name = group.group_id
        for names in (self.queued, self.queued_evals, self.open, self.ready, self.evals):
            names.discard(name)
        if group.guests:
            names = [each.payload for each in group.guests]
            self.pins.subtract(names)
            for each in names:
                if not self.pins[each]:
                    del self.pins[each]
            self.unpinned.update(names)
        if "l" in group.states:
            held = Counter(w for w, s in zip(group.workers, group.states, strict=True) if s == "l")
            self.held.subtract(held)


def parse_results(names: Iterable[bytes], texts: Iterable[bytes]) -> Results:
    """Summaries from the names of episodes, `group/index`, and their records."""
    found: dict[str, dict[int, EpisodeSummary]] = {}
    for name, text in zip(names, texts, strict=True):
        group_id, _, index = name.decode().rpartition("/")
        found.setdefault(group_id, {})[int(index)] = parse_record(EpisodeSummary, text)
    return found


def parse_group(
    group_id: str,
    text: str | bytes,
    *,
    results: Results,
    before: GroupRecord | None = None,
    deadline: float = 0.0,
) -> GroupRecord:
    """Parse a record of the store; leases that `before` already had keep their deadlines."""
    fields: dict[str, Any] = json.loads(text)
    states: str = fields["states"]
    attempts: list[int] = fields["attempts"]
    deadlines = [deadline] * len(states)
    known: Sequence[EpisodeSummary | None] = (None,) * len(states)
    if before is not None:
        # It is shorter before another wave, and longer if the store has gone back in time.
        added = (None,) * (len(states) - len(before.states))
        leases = zip(
            (*before.attempts, *added), (*before.deadlines, *added), attempts, strict=False
        )
        deadlines = [
            old if old is not None and was == now else deadline for was, old, now in leases
        ]
        pairs = zip(states, (*before.results, *added), strict=False)
        known = [None if now in _WITHOUT_RESULT else old for now, old in pairs]
    if found := results.get(group_id):
        known = [found.get(index, old) for index, old in enumerate(known)]
    accepted = fields.get("accepted", False)
    return GroupRecord(
        group_id=group_id,
        seq=fields["seq"],
        position=fields["position"],
        states=states,
        attempts=attempts,
        workers=fields["workers"],
        results=known,
        num_requeues=fields.get("again", 0),
        version=fields.get("version", -1),
        deadlines=deadlines,
        # The results of an accepted group say it, and progress was also of what is left out.
        oldest_seen=before.oldest_seen if before and not accepted else -1,
        accepted=accepted,
        batch=fields.get("batch", -1),
        sampled=before.sampled if before and not accepted else {},
        pick=fields.get("pick", ""),
        starts=fields.get("starts", ""),
        waves=fields.get("waves", 1),
        closed=fields.get("closed", False),
        repairs=fields.get("repairs", 0),
        guests=parse_record(_GUESTS, fields["guests"]) if "guests" in fields else (),
        seen=fields.get("seen", False),
    )
