"""The job's state in memory: a copy of what Redis holds, renewed by every script's answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """What the ledger remembers of a finished episode beside its payload."""

    attempt: int
    reward: float
    truncated: bool
    policy_tokens: int
    tokens: int
    oldest_version: int
    num_bytes: int

    def encode(self) -> str:
        """As it stands in the record."""
        return ",".join(
            (
                str(self.attempt),
                repr(float(self.reward)),
                "1" if self.truncated else "0",
                str(self.policy_tokens),
                str(self.tokens),
                str(self.oldest_version),
                str(self.num_bytes),
            )
        )

    @classmethod
    def decode(cls, text: str) -> Facts:
        """From a record."""
        attempt, reward, truncated, *rest = text.split(",")
        policy, tokens, oldest, size = map(int, rest)
        return cls(int(attempt), float(reward), truncated == "1", policy, tokens, oldest, size)


@dataclass(slots=True)
class Group:
    """One group's record; `states` has a letter per episode (see `store.LETTERS`)."""

    group_id: str
    seq: int
    position: int
    states: str
    attempts: list[int]
    workers: list[str]
    facts: list[str]
    again: int  # how often its task was admitted before
    version: int  # pinned, of an eval group; -1: training
    deadlines: list[float]
    oldest_seen: int = -1  # oldest version that progress told of

    @property
    def is_eval(self) -> bool:
        """Measured, not trained."""
        return self.version >= 0

    @property
    def complete(self) -> bool:
        """All episodes finished; nothing decided."""
        return "f" in self.states and not self.states.strip("f")

    def decoded(self) -> list[Facts]:
        """Facts of all finished episodes, in order."""
        return [Facts.decode(text) for text in self.facts if text]

    def oldest_version(self) -> int:
        """Oldest policy version among what is known of its tokens; -1: none is known."""
        known = [f.oldest_version for f in self.decoded() if f.oldest_version >= 0]
        if self.oldest_seen >= 0:
            known.append(self.oldest_seen)
        return min(known, default=-1)

    def finished(self) -> list[int]:
        """Episodes that have a payload, in order."""
        return [index for index, text in enumerate(self.facts) if text]

    def payload(self, index: int) -> str:
        """Name of an episode's payload."""
        return payload_name(self.group_id, index, int(self.facts[index].partition(",")[0]))

    def payloads(self) -> list[str]:
        """Names of all payloads it has."""
        return [self.payload(index) for index in self.finished()]


Change = tuple[Group | None, Group | None]


def payload_name(group_id: str, index: int, attempt: int) -> str:
    """Attempts have payloads of their own, so that the first to finish wins."""
    return f"{group_id}/{index}/{attempt}"


@dataclass(slots=True)
class Book:
    """Everything planning needs without asking Redis."""

    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    counts: Counter[str] = field(default_factory=Counter[str])
    meta: dict[str, str] = field(default_factory=dict[str, str])
    ages: dict[int, int] = field(default_factory=dict[int, int])  # version -> step it counts as
    versions: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    digests: dict[int, str] = field(default_factory=dict[int, str])  # of versions; empty: unknown
    batches: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    queued: set[str] = field(default_factory=set[str])
    queued_evals: set[str] = field(default_factory=set[str])
    open: set[str] = field(default_factory=set[str])  # training groups on the way to ready
    ready: set[str] = field(default_factory=set[str])
    evals: set[str] = field(default_factory=set[str])
    held: Counter[str] = field(default_factory=Counter[str])  # leased episodes by worker

    def number(self, name: str, default: int = 0) -> int:
        """A whole number of `meta`."""
        return int(float(self.meta.get(name) or default))

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.number("step")

    @property
    def stop(self) -> str:
        """Why no further batch will come; empty: it will."""
        return self.meta.get("stop", "")

    @property
    def closed(self) -> bool:
        """What is trained by now is all that ever will be."""
        return self.stop == "cancelled" or bool(self.meta.get("closed"))

    @property
    def version(self) -> int:
        """The newest publication; -1: none."""
        return self.number("version", -1)

    def apply(
        self, head: dict[str, Any], changed: Iterable[bytes], *, deadline: float
    ) -> list[Change]:
        """Take over what a script changed; new leases last until `deadline`."""
        self.counts.update(head["counts"] or {})
        self.meta.update(head["meta"] or {})
        fields = iter(changed)
        return [
            self.put(name.decode(), text, deadline=deadline)
            for name, text in zip(fields, fields, strict=True)
        ]

    def put(self, group_id: str, text: bytes, *, deadline: float) -> Change:
        """Take over one record, an empty one is gone; the record before and after."""
        before = self.groups.pop(group_id, None)
        if before is not None:
            self._unlist(before)
        if text:
            self.enter(group_id, text, before=before, deadline=deadline)
        return before, self.groups.get(group_id)

    def enter(self, group_id: str, text: bytes, *, before: Group | None, deadline: float) -> None:
        """List a record; leases that `before` knows keep their deadlines."""
        group = _parse(group_id, json.loads(text), before, deadline)
        self.groups[group_id] = group
        self._list(group)

    def age(self, version: int) -> int:
        """The step from which tokens of a version count their age.

        One that the store has lost is no older than the newest known before it.
        """
        if version not in self.ages:
            version = max((known for known in self.ages if known <= version), default=-1)
        return self.ages.get(version, 0)

    def staleness(self, group: Group, step: int) -> int:
        """Age of a group's oldest token if it is trained at `step`."""
        oldest = group.oldest_version()
        return 0 if oldest < 0 else step - self.age(oldest)

    def leased(self) -> Iterable[tuple[Group, int]]:
        """All episodes out on lease."""
        for group_id in [*self.open, *self.evals]:
            group = self.groups[group_id]
            for index, state in enumerate(group.states):
                if state == "l":
                    yield group, index

    def find(self, group_id: str, index: int, attempt: int) -> Group | None:
        """The group, if this attempt holds the lease of the episode."""
        group = self.groups.get(group_id)
        if group is None or not 0 <= index < len(group.states):
            return None
        holds = group.states[index] == "l" and group.attempts[index] == attempt
        return group if holds else None

    def _list(self, group: Group) -> None:
        name, states = group.group_id, group.states
        if group.is_eval:
            self.evals.add(name)
        elif "r" in states:
            self.ready.add(name)
        elif not states.strip("qlf"):
            self.open.add(name)
        if "q" in states:
            (self.queued_evals if group.is_eval else self.queued).add(name)
        self.held.update(w for w, s in zip(group.workers, states, strict=True) if s == "l")

    def _unlist(self, group: Group) -> None:
        name = group.group_id
        for names in (self.queued, self.queued_evals, self.open, self.ready, self.evals):
            names.discard(name)
        if "l" in group.states:
            gone = Counter(w for w, s in zip(group.workers, group.states, strict=True) if s == "l")
            self.held.subtract(gone)


def _parse(group_id: str, fields: dict[str, Any], before: Group | None, deadline: float) -> Group:
    states: str = fields["s"]
    attempts = [int(a) for a in fields["a"]]
    deadlines = [deadline] * len(states)
    if before is not None:
        same = zip(before.attempts, before.deadlines, attempts, strict=True)
        deadlines = [old if was == now else deadline for was, old, now in same]
    return Group(
        group_id=group_id,
        seq=int(fields["q"]),
        position=int(fields["p"]),
        states=states,
        attempts=attempts,
        workers=fields["w"],
        facts=fields["f"],
        again=int(fields.get("r", 0)),
        version=int(fields.get("e", -1)),
        deadlines=deadlines,
        oldest_seen=before.oldest_seen if before else -1,
    )
