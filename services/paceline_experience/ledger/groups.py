"""Accepts finished episodes, completes groups and applies the filters to them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline import wire
from paceline.enums import DropReason, EpisodeOutcome, EpisodeState
from paceline.errors import InvalidError
from paceline.telemetry.logs import Log
from paceline.text import clipped
from paceline.types import Trajectory
from paceline.v1 import types_pb2
from paceline.v1 import types_pb2 as pb
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.filters.chain import FilterChain, finished_group
from paceline_experience.ledger.own.later import LaterDecisions
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.records import EpisodeSummary, OutcomeRecord, record_text
from paceline_experience.ledger.state import GroupRecord, payload_name
from paceline_experience.ledger.task_cursor import Draw
from paceline_experience.store.payloads import PayloadStore, pack

ANSWER_BYTES = 256
log = Log("groups")


class Verdict(StrEnum):
    """The outcome of an attempt; values as `report.lua` expects them."""

    OK = "ok"
    REQUEUE = "again"  # an infrastructure failure, or an expired lease
    DRAIN = "drain"  # its worker drains: uses up no attempt
    INVALID = "invalid"
    OVERSIZED = "oversized"
    GONE = "gone"  # its pinned version is gone


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one attempt."""

    group_id: str
    index: int
    attempt: int
    verdict: Verdict
    detail: str = ""  # human-readable
    result: EpisodeSummary | None = None  # None: not finished

    @property
    def unusable(self) -> bool:
        """Whether another attempt would end the same way, so that the group is dropped."""
        return self.verdict in {Verdict.INVALID, Verdict.OVERSIZED}

    def script_argument(self, max_bytes: int) -> dict[str, object]:
        """As `report.lua` takes it, with a detail of at most `max_bytes`."""
        fields: dict[str, object] = {
            "group": self.group_id,
            "index": self.index,
            "attempt": self.attempt,
            "verdict": self.verdict,
        }
        if self.result is not None:
            text = record_text(self.result)
            return {**fields, "result": text, "policy_tokens": self.result.policy_tokens}
        return {**fields, "detail": clipped(self.detail, max_bytes)}


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """What becomes of a complete group."""

    group_id: str
    verdict: str  # `ready`, or the reason to drop the group
    detail: str = ""  # what was wrong with it
    left_out: tuple[int, ...] = ()  # episodes that the filters leave out of a group that is kept
    outcome: str = ""  # for advantages with a memory

    def script_argument(self) -> dict[str, object]:
        """As `decide.lua` takes it."""
        return {
            "group": self.group_id,
            "verdict": self.verdict,
            "detail": self.detail,
            "left_out": self.left_out,
            "outcome": self.outcome,
        }


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted trajectory, ready to be stored; an empty payload is not stored."""

    report: Report
    payload: bytes
    message: pb.Trajectory

    @property
    def name(self) -> str:
        """Name of its payload."""
        return payload_name(self.report.group_id, self.report.index, self.report.attempt)


def _parts(score: pb.Score) -> dict[str, float]:
    """The parts of a reward that has several."""
    if len(score.parts) < 2:
        return {}
    return {name: value for name, value in score.parts.items() if math.isfinite(value)}


class Groups:
    """Finished episodes, and the decisions on their groups."""

    def __init__(
        self,
        *,
        core: LedgerContext,
        payloads: PayloadStore,
        compress_over_bytes: int,
        observe: bool = False,
        own: OwnParts = NO_PARTS,
    ) -> None:
        """`observe`: keep the outcomes of decided groups until the next batch is fixed.

        `own`: the filters that came with the job.
        """
        self._core = core
        self._payloads = payloads
        self._observe = observe
        self._compress_over = compress_over_bytes
        self._sizes: dict[str, int] = {}
        self.payload_bytes = 0
        self._num_accepted, self._accepted_bytes = 0, 0
        self._filters = FilterChain(core.spec, own)
        self._later = LaterDecisions(self._decide_later) if self._filters.slow else None

    @property
    def mean_bytes(self) -> float:
        """Mean size of the payloads accepted so far."""
        return self._accepted_bytes / self._num_accepted if self._num_accepted else 0.0

    async def recover(self, listed: Collection[str]) -> None:
        """Count stored payloads; delete those of no group that are not `listed` either."""
        self._sizes = await self._payloads.sizes()
        owned = {name for g in self._core.state.groups.values() for name in g.payloads()}
        await self.free([name for name in self._sizes if name not in owned and name not in listed])
        self.payload_bytes = sum(self._sizes.values())

    async def submit(
        self, trajectories: Sequence[Trajectory | pb.Trajectory | bytes]
    ) -> list[EpisodeOutcome]:
        """Store trajectories; returns the outcome of each."""
        submissions = [self._submission(item) for item in trajectories]
        async with self._core.transaction() as state:
            new: dict[str, bytes] = {}
            for each in submissions:
                if each.payload and self._is_open(state.groups, each):
                    new.setdefault(each.name, each.payload)
            await self._payloads.put(new)
            for name, data in new.items():
                self.payload_bytes += len(data) - self._sizes.get(name, 0)
                self._sizes[name] = len(data)
            outcomes = await self.report([each.report for each in submissions])
            accepted = [
                each
                for each, outcome in zip(submissions, outcomes, strict=True)
                if outcome is EpisodeOutcome.ACCEPTED
            ]
            names = {each.name for each in accepted}
            self._num_accepted += len(names)
            self._accepted_bytes += sum(len(new[name]) for name in names)
            await self.free([name for name in new if name not in names])
            for each in accepted:
                self._core.meter.submitted(each.message)
        return outcomes

    def _is_open(self, groups: dict[str, GroupRecord], submission: Submission) -> bool:
        group = groups.get(submission.report.group_id)
        index = submission.report.index
        return group is not None and 0 <= index < len(group.states) and group.states[index] in "ql"

    def _submission(self, item: Trajectory | pb.Trajectory | bytes) -> Submission:
        if isinstance(item, Trajectory):
            message = wire.to_proto(item, pb.Trajectory)
        elif isinstance(item, bytes):
            message = pb.Trajectory.FromString(item)
        else:
            message = item
        key = (message.group_id, message.index, message.attempt)
        score = message.score
        if score.status == types_pb2.SCORE_STATUS_INFRA_ERROR or not math.isfinite(score.reward):
            return Submission(Report(*key, Verdict.REQUEUE, score.detail), b"", message)
        data = item if isinstance(item, bytes) else message.SerializeToString()
        if problem := self._core.limits.excess("trajectory_bytes", len(data)):
            return Submission(Report(*key, Verdict.OVERSIZED, problem), b"", message)
        payload = pack(data, self._compress_over)
        transcripts = message.transcripts
        versions = [run.version for t in transcripts for run in t.versions]
        result = EpisodeSummary(
            attempt=message.attempt,
            reward=score.reward,
            truncated=message.truncated,
            policy_tokens=sum(len(t.logprobs) for t in transcripts),
            tokens=sum(len(t.tokens) for t in transcripts),
            oldest_version=min(versions, default=-1),
            num_bytes=len(payload),
            answer=clipped(score.normalised_answer, ANSWER_BYTES),
            parts=_parts(score),
        )
        return Submission(Report(*key, Verdict.OK, result=result), payload, message)

    async def report(self, reports: Sequence[Report]) -> list[EpisodeOutcome]:
        """Inside a transaction: record outcomes of attempts and settle their groups."""
        state = self._core.state
        before = {r.group_id: state.groups.get(r.group_id) for r in reports}
        max_bytes = self._core.limits.settings.reason_bytes
        argument = {
            "max_attempts": self._core.spec.experience.max_attempts,
            "observe": self._observe,
            "items": [report.script_argument(max_bytes) for report in reports],
        }
        answer: list[str] = await self._core.change("report", json.dumps(argument))
        outcomes = [EpisodeOutcome(each) for each in answer]
        gone = {name: g for name, g in before.items() if g and name not in state.groups}
        await self._requeue_failed(reports, gone)
        await self.free([name for g in gone.values() for name in g.payloads()])
        await self.settle([name for name in before if name in state.open])
        if gone or any(outcome is EpisodeOutcome.REQUEUED for outcome in outcomes):
            self._core.work.fire()
        return outcomes

    async def _requeue_failed(
        self, reports: Sequence[Report], gone: dict[str, GroupRecord]
    ) -> None:
        """A task that failed only on infrastructure is not consumed: it gets one more group."""
        unusable = {r.group_id for r in reports if r.unusable}
        failed = [g for g in gone.values() if g.group_id not in unusable and not g.is_eval]
        await self._requeue_tasks([group for group in failed if not group.num_requeues])

    async def _requeue_tasks(self, groups: Sequence[GroupRecord]) -> None:
        for group in groups:
            self._core.cursor.requeue(
                Draw(group.seq, group.position, group.num_requeues + 1, group.pick, group.seen)
            )
        if groups:
            await self._core.note(feed=self._core.cursor.state())

    async def settle(self, names: Sequence[str]) -> None:
        """Inside a transaction: apply the filters to those groups that are complete."""
        state = self._core.state
        complete = [state.groups[name] for name in names if state.groups[name].complete]
        if self._later is not None:
            self._later.add(complete)
        elif complete:
            await self._decide(complete, [await self._decision(group) for group in complete])

    def close(self) -> None:
        """Decide on nothing more."""
        if self._later is not None:
            self._later.close()

    async def _decide_later(self, group: GroupRecord) -> None:
        """Decide on a group that was complete, unless it has changed before its filters answer."""
        decision = await self._decision(group)
        async with self._core.transaction() as state:
            now = state.groups.get(group.group_id)
            if now is not None and now.complete and now.attempts == group.attempts:
                await self._decide([now], [decision])

    async def _decide(
        self, complete: Sequence[GroupRecord], decisions: Sequence[GroupDecision]
    ) -> None:
        """Inside a transaction: do what was decided on complete groups."""
        state = self._core.state
        fields = [each.script_argument() for each in decisions]
        await self._core.change("decide", json.dumps(fields))
        for group in complete:
            if not group.is_eval:
                self._core.meter.decided([f.reward for f in group.summaries()])
        gone = [name for group in complete for name in self._gone(group)]
        await self.free(gone)
        if gone:
            self._core.work.fire()
        if any(group.group_id in state.groups for group in complete):
            self._core.ready.fire()

    def _gone(self, before: GroupRecord) -> Iterable[str]:
        """Payloads of episodes that a group has lost."""
        after = self._core.state.groups.get(before.group_id)
        kept = set(after.payloads()) if after else set[str]()
        return (name for name in before.payloads() if name not in kept)

    async def _decision(self, group: GroupRecord) -> GroupDecision:
        """What becomes of a complete group, according to the filters."""
        try:
            kept = await self._filters.kept(finished_group(group))
        except InvalidError as error:
            log.exception("a filter has failed", job=self._core.job_id, group=group.group_id)
            detail = clipped(error.message, self._core.limits.settings.reason_bytes)
            return GroupDecision(group.group_id, DropReason.INVALID, detail=detail)
        left_out = tuple(i for i in range(len(group.states)) if i not in kept) if kept else ()
        return GroupDecision(
            group.group_id,
            EpisodeState.READY if kept else DropReason.FILTERED,
            left_out=left_out,
            outcome=self._observed(group, filtered=not kept, left_out=left_out),
        )

    def _observed(
        self, group: GroupRecord, *, filtered: bool, left_out: tuple[int, ...] = ()
    ) -> str:
        """What plug-ins with a memory will be told of a decided group, as JSON."""
        if not self._observe or group.is_eval or group.seen:
            return ""
        found = group.summaries()
        names = sorted({name for each in found for name in each.parts})
        outcome = OutcomeRecord(
            seq=group.seq,
            task=group.position,
            rewards=tuple(e.reward for e in found),
            answers=tuple(e.answer for e in found),
            filtered=filtered,
            lengths=tuple(e.policy_tokens for e in found),
            truncated=tuple(e.truncated for e in found),
            parts={name: tuple(e.parts.get(name) for e in found) for name in names},
            left_out=left_out,
            pick=group.pick,
        )
        return record_text(outcome)

    def _given_up(self, group: GroupRecord, reason: DropReason) -> str:
        """The same for one that is dropped before it was decided, and does not come again."""
        if not self._observe or group.is_eval or group.seen:
            return ""
        return record_text(
            OutcomeRecord(seq=group.seq, task=group.position, failed=reason, pick=group.pick)
        )

    async def drop(self, names: Sequence[str], reason: DropReason) -> None:
        """Inside a transaction: drop whole groups."""
        if not names:
            return
        state = self._core.state
        groups = [state.groups[name] for name in names if name in state.groups]
        payloads = [name for group in groups for name in group.payloads()]
        # Otherwise slow tasks would be trained on less often than others.
        limit = self._core.spec.experience.max_attempts if reason is DropReason.STALE else 0
        again = [g for g in groups if not g.is_eval and g.num_requeues < limit]
        final = {
            g.group_id: self._given_up(g, reason)
            for g in groups
            if reason is DropReason.STALE and g not in again
        }
        decisions = [
            GroupDecision(name, reason, outcome=final.get(name, "")).script_argument()
            for name in names
        ]
        await self._core.change("decide", json.dumps(decisions))
        await self.free(payloads)
        if again:
            await self._requeue_tasks(again)
        self._core.work.fire()

    async def free(self, names: Sequence[str]) -> None:
        """Delete payloads."""
        if names:
            await self._payloads.drop(names)
            self.payload_bytes -= sum(self._sizes.pop(name, 0) for name in names)
