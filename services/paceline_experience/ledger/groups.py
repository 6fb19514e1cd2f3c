"""Accepts finished episodes, completes groups and applies the filters to them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.enums import DropReason, EpisodeOutcome
from paceline.types import EpisodeProgress
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.filters.decider import Decider, Over
from paceline_experience.ledger.filters.decision import CLOSE, STAYS_OPEN, GroupDecision
from paceline_experience.ledger.generation.aborts import Aborts
from paceline_experience.ledger.generation.allocation import Allocation, GroupSizes
from paceline_experience.ledger.generation.back_off import BackOff, of_training
from paceline_experience.ledger.generation.losses import Losses
from paceline_experience.ledger.generation.prefix import prefixes
from paceline_experience.ledger.generation.submission import (
    Report,
    Submission,
    Submitted,
    submission,
)
from paceline_experience.ledger.own.later import LaterDecisions, Undecided
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.replay.stage import ReplayStage
from paceline_experience.ledger.staleness import too_late_groups
from paceline_experience.ledger.state import DROPPED, GroupRecord
from paceline_experience.ledger.stored.samples import KeptSamples
from paceline_experience.ledger.task_cursor import Draw
from paceline_experience.store.payloads import PayloadStore

_Decided = tuple[GroupRecord, GroupDecision]


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
        allocation: Allocation | None = None,
        replay: ReplayStage | None = None,
    ) -> None:
        """`observe`: keep the outcomes of decided groups until the next batch is fixed.

        `own`: the filters that came with the job.
        """
        self.allocation, self._replay = allocation, replay
        self.sizes = GroupSizes(core.spec.experience.group_size)
        self.losses, self.back_off = Losses(), BackOff(core.job_id, core.clock.now, core.num_leased)
        self.aborts = Aborts()
        self._core = core
        self._payloads = payloads
        self._observe = observe
        self.compress_over = compress_over_bytes
        self.samples = KeptSamples(core)
        self._sizes: dict[str, int] = {}
        self.payload_bytes = 0
        self._num_accepted, self._accepted_bytes = 0, 0
        self._decider = Decider(
            core, observe=observe, own=own, allocation=allocation, replay=replay
        )
        self._later = LaterDecisions(self._decide_later) if self._decider.slow else None

    @property
    def problem(self) -> str:
        """Why no group can be started any more, so that the job fails; empty: they can."""
        return "" if self.allocation is None else self.allocation.problem

    @property
    def mean_bytes(self) -> float:
        """Mean size of the payloads accepted so far."""
        return self._accepted_bytes / self._num_accepted if self._num_accepted else 0.0

    async def recover(self, listed: Collection[str]) -> None:
        """Count stored payloads; delete those of no group that are not `listed` either."""
        self._sizes = await self._payloads.sizes()
        await self.samples.load(self._sizes)
        owned = {name for g in self._core.state.groups.values() for name in g.payloads()}
        await self.free([name for name in self._sizes if name not in owned and name not in listed])
        self.payload_bytes = sum(self._sizes.values())
        if self._core.state.closed:
            await self.forget_stored()
        training = (g for g in self._core.state.groups.values() if g.accepted and not g.is_eval)
        for group in sorted(training, key=lambda each: each.seq):
            self.sizes.add(len(group.states))

    async def submit(self, trajectories: Sequence[Submitted]) -> list[EpisodeOutcome]:
        """Store trajectories; returns the outcome of each."""
        submissions = [
            submission(
                item,
                limits=self._core.limits,
                compress_over_bytes=self.compress_over,
                waves=self.allocation is not None,
            )
            for item in trajectories
        ]
        async with self._core.transaction() as state:
            new: dict[str, bytes] = {}
            for each in submissions:
                if each.payload and self._is_open(state.groups, each):
                    new.setdefault(each.name, each.payload)
            await self._store(new)
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
            self._core.meter.submitted([each.message for each in accepted])
        return outcomes

    async def _store(self, new: Mapping[str, bytes]) -> None:
        await self._payloads.put(new)
        for name, data in new.items():
            self.payload_bytes += len(data) - self._sizes.get(name, 0)
            self._sizes[name] = len(data)

    async def bring(self, imported: Sequence[tuple[int, Submission]]) -> int:
        """Inside a transaction: store these, by position of their tasks; returns how many stay."""
        assert self._replay is not None
        await self._store({each.name: each.payload for _, each in imported})
        await self._core.decide([self._replay.brought(imported)])
        await self.free([each.name for _, each in imported])
        return sum(self._core.state.pool.needs(each.name) for _, each in imported)

    def _is_open(self, groups: dict[str, GroupRecord], submission: Submission) -> bool:
        group = groups.get(submission.report.group_id)
        index = submission.report.index
        return group is not None and 0 <= index < len(group.states) and group.states[index] in "ql"

    async def report(self, reports: Sequence[Report]) -> list[EpisodeOutcome]:
        """Inside a transaction: record outcomes of attempts and settle their groups."""
        state = self._core.state
        self.losses.note_failures(reports)
        before = {r.group_id: state.groups.get(r.group_id) for r in reports}
        max_bytes = self._core.limits.settings.reason_bytes
        argument = {
            "max_attempts": self._core.spec.experience.max_attempts,
            "observe": self._observe,
            "items": [report.script_argument(max_bytes) for report in reports],
        }
        answer: list[str] = await self._core.change("report", json.dumps(argument))
        outcomes = [EpisodeOutcome(each) for each in answer]
        if self.back_off.note(of_training(before, reports, outcomes)):
            self._core.work.fire()
        gone = {name: g for name, g in before.items() if g and name not in state.groups}
        for group in gone.values():
            self.losses.note(group, None)
            self.aborts.note(group, None)
        await self._requeue_failed(reports, gone)
        lost = [name for g in gone.values() for name in g.payloads()]
        await self.free(lost, dropped=DropReason.GROUP_FAILED)
        finished: dict[str, list[int]] = {}
        for report, outcome in zip(reports, outcomes, strict=True):
            if outcome is EpisodeOutcome.ACCEPTED:
                finished.setdefault(report.group_id, []).append(report.index)
        await self.settle([name for name in before if name in state.open], finished)
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

    async def settle(
        self, names: Sequence[str], finished: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Inside a transaction: decide on those groups that are complete, or have enough.

        `finished`: episodes that have just finished, in order; if not given, all that have.
        """
        await self.drop(late := self._too_late(names), DropReason.STALE)
        undecided: list[Undecided] = []
        for group in (self._core.state.groups[name] for name in names if name not in late):
            new = group.finished() if finished is None else finished.get(group.group_id, ())
            undecided.append(Undecided(group, tuple(new)))
        if self._later is not None and self._decider.allocates_later:
            self._later.add([each for each in undecided if self._decider.may_be_over(each.group)])
        else:
            await self._settle(undecided)

    async def _settle(self, undecided: Sequence[Undecided]) -> None:
        """Inside a transaction: ask an installed allocator, then filters, now or later."""
        decided: list[_Decided] = []
        over: list[tuple[GroupRecord, Over]] = []
        for each in undecided:
            found = await self._decider.over(each.group, each.new)
            if isinstance(found, GroupDecision):
                decided.append((each.group, found))
            elif found is not None:
                over.append((each.group, found))
        for group, found in over:
            if self._later is None:
                decision = await self._decider.decision(group.without(found.late or ()))
                decided.append((group, replace(decision, surplus=found.late)))
            elif found.late is not None:
                closing = GroupDecision(group.group_id, CLOSE, surplus=found.late)
                decided.append((group, closing))
        await self._decide(decided)
        if self._later is not None:
            groups = self._core.state.groups
            self._later.add([Undecided(groups[group.group_id]) for group, _ in over])

    def _too_late(self, names: Iterable[str]) -> list[str]:
        most = self._core.spec.experience.max_staleness
        return too_late_groups(self._core.state, names, max_staleness=most)

    def close(self) -> None:
        """Decide on nothing more."""
        if self._later is not None:
            self._later.close()

    async def _decide_later(self, undecided: Undecided) -> None:
        """Decide on a group, unless it changes before its allocator or filters answer."""
        group, found = undecided.group, Over()
        if self._decider.allocates_later:
            found = await self._decider.over(group, undecided.new)
        if isinstance(found, Over) and found.late is None:
            found = await self._decider.decision(group)
        if found is None:
            return
        async with self._core.transaction() as state:
            now = state.groups.get(group.group_id)
            if now is None or now.group_id not in state.open or not now.follows(group):
                return
            if late := self._too_late([now.group_id]):
                return await self.drop(late, DropReason.STALE)
            if isinstance(found, Over):
                await self._close_early(now, counted=group.without(found.late or ()))
            elif found.verdict == DropReason.INVALID or now.complete:
                await self._decide_if_stored(now, found)

    async def _close_early(self, now: GroupRecord, *, counted: GroupRecord) -> None:
        """Close a group with what had finished when its allocator had enough."""
        if now.closed:
            return
        surplus = tuple(index for index in now.finished() if index not in counted.finished())
        await self._decide([(now, GroupDecision(now.group_id, CLOSE, surplus=surplus))])
        assert self._later is not None
        self._later.add([Undecided(self._core.state.groups[now.group_id])])

    async def _decide_if_stored(self, now: GroupRecord, decision: GroupDecision) -> None:
        assert self._later is not None
        if all(self._core.state.pool.needs(guest.payload) for guest in decision.guests):
            await self._decide([(now, decision)])
        else:
            self._later.add([Undecided(now)])

    async def _decide(self, decided: Sequence[_Decided]) -> None:
        """Inside a transaction: do what was decided on groups."""
        if not decided:
            return
        state = self._core.state
        fields = [decision.script_argument() for _, decision in decided]
        if self._replay is not None:
            for (group, decision), each in zip(decided, fields, strict=True):
                each |= self._replay.changes(group, decision.stored)
        await self._core.decide(fields)
        ended = [group for group, decision in decided if decision.verdict not in STAYS_OPEN]
        for group in ended:
            if not group.is_eval:
                self._core.meter.decided([f.reward for f in group.summaries()])
                self.sizes.add(len(group.states))
        ended_early = False
        for group, _ in decided:
            after = state.groups.get(group.group_id)
            if after is None or DROPPED in after.states:
                self.losses.note(group, after)
                ended_early |= self.aborts.note(group, after)
        gone = False
        for group, decision in decided:
            lost = list(self._gone(group))
            gone |= bool(lost)
            await self.free(lost, dropped=decision.reason)
        if gone or ended_early or len(ended) < len(decided):
            self._core.work.fire()
        if any(group.group_id in state.groups for group in ended):
            self._core.ready.fire()

    def _gone(self, before: GroupRecord) -> Iterable[str]:
        """Payloads of episodes that a group has lost."""
        after = self._core.state.groups.get(before.group_id)
        kept = set(after.payloads()) if after else set[str]()
        return (name for name in before.payloads() if name not in kept)

    async def prefixes(self, group: GroupRecord, indices: Sequence[int]) -> list[EpisodeProgress]:
        """What those of these episodes that continue a sibling begin with."""
        return await prefixes(group, indices, self._payloads)

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
            g.group_id: self._decider.outcome_of_given_up(g, reason)
            for g in groups
            if reason is DropReason.STALE and g not in again
        }
        decisions = [
            GroupDecision(name, reason, outcome=final.get(name, "")).script_argument()
            for name in names
        ]
        if self._replay is not None and again:
            decisions += self._replay.taken_back(again)
        await self._core.decide(decisions)
        for group in groups:
            self.losses.note(group, None)
            self.aborts.note(group, None)
        await self.free(payloads, dropped=reason)
        if again:
            await self._requeue_tasks(again)
        self._core.work.fire()

    def settled(self, *, unfixed: int) -> list[str]:
        """Keys that leave the pool of stored episodes as a batch is fixed."""
        return [] if self._replay is None else self._replay.settled(unfixed=unfixed)

    async def free(
        self,
        names: Sequence[str],
        *,
        dropped: DropReason | None = None,
        trained: Mapping[str, int] | None = None,
    ) -> None:
        """Inside a transaction: delete payloads, but those that a replay still needs, and samples.

        Some become samples if they are `dropped`, or were `trained` at the steps that this says.
        """
        if dropped is not None:
            trained = dict.fromkeys(names, self._core.state.step)
        gone: list[str] = []
        if trained:
            gone = await self.samples.keep(trained, self._sizes, dropped=dropped)
        if self._replay is not None:
            names = await self._replay.unused(names, let_go=gone)
        else:
            names = list(dict.fromkeys([*names, *gone]))
        names = [name for name in names if name not in self.samples.names]
        if names:
            await self._payloads.drop(names)
            if dropped is None:  # of others there is no note
                await self.samples.forget(names)
            self.payload_bytes -= sum(self._sizes.pop(name, 0) for name in names)

    async def forget_stored(self) -> None:
        """Inside a transaction: the job is over, and nothing is replayed any more."""
        if self._replay is not None:
            await self._replay.clear()
            await self.free(())
