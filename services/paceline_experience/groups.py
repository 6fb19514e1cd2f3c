"""Takes in finished episodes, completes groups and passes them through the filters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import plugins, wire
from paceline.interfaces import GroupFilter
from paceline.logs import Log
from paceline.text import clipped
from paceline.types import DropReason, Trajectory, VerifierStatus
from paceline.v1 import types_pb2 as pb
from paceline_experience.book import Facts, Group, payload_name
from paceline_experience.core import Core
from paceline_experience.payloads import PayloadStore, pack

log = Log("groups")


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one attempt.

    The verdict is `ok`, `again`, `drain`, `invalid`, `oversized` or `gone`.
    """

    group_id: str
    index: int
    attempt: int
    verdict: str
    detail: str = ""  # facts of a finished one

    @property
    def unusable(self) -> bool:
        """Another attempt would end the same way: the group is dropped."""
        return self.verdict in {DropReason.INVALID, DropReason.OVERSIZED}


@dataclass(frozen=True, slots=True)
class Entry:
    """A submitted trajectory, ready to be kept."""

    report: Report
    payload: bytes
    message: pb.Trajectory

    @property
    def name(self) -> str:
        """Of its payload."""
        return payload_name(self.report.group_id, self.report.index, self.report.attempt)


class Groups:
    """Finished episodes and what becomes of their groups."""

    def __init__(self, *, core: Core, payloads: PayloadStore, compress_over_bytes: int) -> None:
        self._core = core
        self._payloads = payloads
        self._compress_over = compress_over_bytes
        self._sizes: dict[str, int] = {}
        self.payload_bytes = 0
        self._submitted, self._submitted_bytes = 0, 0
        self._filters: list[tuple[str, GroupFilter, dict[str, Any]]] = [
            (f.kind, plugins.find("filters", f.kind), f.options)
            for f in core.spec.experience.filters
        ]

    @property
    def mean_bytes(self) -> float:
        """Of the payloads of episodes seen so far."""
        return self._submitted_bytes / self._submitted if self._submitted else 0.0

    async def open(self, kept: Callable[[str], bool]) -> None:
        """Count what is kept; let go of what a crash left without an owner."""
        self._sizes = await self._payloads.sizes()
        owned = {name for g in self._core.book.groups.values() for name in g.payloads()}
        await self.free([name for name in self._sizes if name not in owned and not kept(name)])
        self.payload_bytes = sum(self._sizes.values())

    async def submit(self, trajectories: Sequence[Trajectory | pb.Trajectory | bytes]) -> list[str]:
        """Keep trajectories; the outcome of each."""
        entries = [self._entry(item) for item in trajectories]
        async with self._core.transaction() as book:
            new: dict[str, bytes] = {}
            for entry in entries:
                if entry.payload and self._wanted(book.groups, entry):
                    new.setdefault(entry.name, entry.payload)
            await self._payloads.put(new)
            for name, data in new.items():
                self.payload_bytes += len(data) - self._sizes.get(name, 0)
                self._sizes[name] = len(data)
            outcomes = await self.report([e.report for e in entries])
            kept = {e.name for e, o in zip(entries, outcomes, strict=True) if o == "accepted"}
            self._submitted += len(kept)
            self._submitted_bytes += sum(len(new[name]) for name in kept)
            await self.free([name for name in new if name not in kept])
            for entry, outcome in zip(entries, outcomes, strict=True):
                if outcome == "accepted":
                    self._core.meter.submitted(entry.message)
        return outcomes

    def _wanted(self, groups: dict[str, Group], entry: Entry) -> bool:
        group = groups.get(entry.report.group_id)
        index = entry.report.index
        return group is not None and 0 <= index < len(group.states) and group.states[index] in "ql"

    def _entry(self, item: Trajectory | pb.Trajectory | bytes) -> Entry:
        if isinstance(item, Trajectory):
            message = wire.trajectory_to(item)
        elif isinstance(item, bytes):
            message = pb.Trajectory.FromString(item)
        else:
            message = item
        key = (message.group_id, message.index, message.attempt)
        score = message.score
        if score.status == VerifierStatus.INFRA_ERROR or not math.isfinite(score.reward):
            return Entry(Report(*key, "again", score.detail), b"", message)
        data = item if isinstance(item, bytes) else message.SerializeToString()
        if problem := self._core.limits.excess("trajectory_bytes", len(data)):
            return Entry(Report(*key, DropReason.OVERSIZED, problem), b"", message)
        payload = pack(data, self._compress_over)
        transcripts = message.transcripts
        oldest = [run.version for t in transcripts for run in t.versions]
        facts = Facts(
            attempt=message.attempt,
            reward=score.reward,
            truncated=message.truncated,
            policy_tokens=sum(len(t.logprobs) for t in transcripts),
            tokens=sum(len(t.tokens) for t in transcripts),
            oldest_version=min(oldest, default=-1),
            num_bytes=len(payload),
        )
        return Entry(Report(*key, "ok", facts.encode()), payload, message)

    async def report(self, reports: Sequence[Report]) -> list[str]:
        """Inside a transaction: enter what became of episodes, and of their groups."""
        book = self._core.book
        before = {r.group_id: book.groups.get(r.group_id) for r in reports}
        most_bytes = self._core.limits.settings.reason_bytes
        items = [
            [r.group_id, r.index, r.attempt, r.verdict, clipped(r.detail, most_bytes)]
            for r in reports
        ]
        most = self._core.spec.experience.max_attempts
        argument = json.dumps({"most": most, "items": items})
        outcomes: list[str] = await self._core.change("report", argument)
        gone = {name: g for name, g in before.items() if g and name not in book.groups}
        await self._redo(reports, gone)
        await self.free([name for g in gone.values() for name in g.payloads()])
        await self.settle([name for name in before if name in book.open])
        if gone or any(outcome == "requeued" for outcome in outcomes):
            self._core.work.fire()
        return outcomes

    async def _redo(self, reports: Sequence[Report], gone: dict[str, Group]) -> None:
        """A task that only infrastructure failed on is not consumed; it gets one more group."""
        unusable = {r.group_id for r in reports if r.unusable}
        failed = [g for g in gone.values() if g.group_id not in unusable and not g.is_eval]
        await self._admit_again([group for group in failed if not group.again])

    async def _admit_again(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._core.feed.redo(group.seq, group.position, group.again + 1)
        if groups:
            await self._core.note(feed=self._core.feed.state())

    async def settle(self, names: Sequence[str]) -> None:
        """Inside a transaction: decide on those groups that are complete."""
        book = self._core.book
        complete = [book.groups[name] for name in names if book.groups[name].complete]
        if not complete:
            return
        verdicts = [[group.group_id, *self._verdict(group)] for group in complete]
        payloads = {g.group_id: g.payloads() for g in complete}
        await self._core.change("decide", json.dumps(verdicts))
        for group in complete:
            if not group.is_eval:
                self._core.meter.decided([f.reward for f in group.decoded()])
        dropped = [name for name in payloads if name not in book.groups]
        await self.free([p for name in dropped for p in payloads[name]])
        if dropped:
            self._core.work.fire()
        if len(dropped) < len(complete):
            self._core.ready.fire()

    def _verdict(self, group: Group) -> tuple[str, str]:
        """What becomes of a group, and what is to be told of it."""
        rewards = [f.reward for f in group.decoded()]
        for index, (kind, check, options) in enumerate(self._filters):
            try:
                if check(rewards, **options):
                    return DropReason.FILTERED, ""
            except (Exception, SystemExit) as error:  # a filter may raise anything; others go on
                log.exception("a filter has failed", job=self._core.job_id, group=group.group_id)
                text = f"experience.filters.{index}: {kind}: {type(error).__name__}: {error}"
                return DropReason.INVALID, clipped(text, self._core.limits.settings.reason_bytes)
        return "ready", ""

    async def drop(self, names: Sequence[str], reason: DropReason) -> None:
        """Inside a transaction: drop whole groups."""
        if not names:
            return
        book = self._core.book
        groups = [book.groups[name] for name in names if name in book.groups]
        payloads = [name for group in groups for name in group.payloads()]
        await self._core.change("decide", json.dumps([[n, reason] for n in names]))
        await self.free(payloads)
        if reason is DropReason.STALE:
            # Else tasks that take long would be trained on less often than others.
            most = self._core.spec.experience.max_attempts
            await self._admit_again([g for g in groups if not g.is_eval and g.again < most])
        self._core.work.fire()

    async def free(self, names: Sequence[str]) -> None:
        """Let payloads go."""
        if names:
            await self._payloads.drop(names)
            self.payload_bytes -= sum(self._sizes.pop(name, 0) for name in names)
