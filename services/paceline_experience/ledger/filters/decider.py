"""Asks the allocator, the replay and the filters of a job what becomes of a group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.enums import DropReason, EpisodeState
from paceline.errors import InvalidError
from paceline.platform.telemetry.logs import Log
from paceline.platform.text import clipped
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.counts import filter_reason
from paceline_experience.ledger.filters.chain import FilterChain, finished_group
from paceline_experience.ledger.filters.decision import MORE, GroupDecision
from paceline_experience.ledger.filters.outcomes import given_up, observed
from paceline_experience.ledger.generation.allocation import Allocation, repeated
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.replay.pool import StoredRecord
from paceline_experience.ledger.replay.stage import Offered, ReplayStage
from paceline_experience.ledger.state import GroupRecord

MAX_REPAIRS = 3  # of a group, by filters
log = Log("decider")


@dataclass(frozen=True, slots=True)
class Over:
    """A group on which filters decide; `late`: it has enough, without these finished episodes."""

    late: tuple[int, ...] | None = None


class Decider:
    """What becomes of groups; changes nothing."""

    def __init__(
        self,
        core: LedgerContext,
        *,
        observe: bool,
        own: OwnParts = NO_PARTS,
        allocation: Allocation | None = None,
        replay: ReplayStage | None = None,
    ) -> None:
        """`observe`: say what plug-ins that learn are told of a group."""
        self._core = core
        self._observe = observe
        self._allocation = allocation
        self._replay = replay
        self._filters = FilterChain(core.spec, own)

    @property
    def slow(self) -> bool:
        """Whether some of them came with the job, so that answers may be a long time coming."""
        replays_later = self._replay is not None and self._replay.slow
        return self._filters.slow or self.allocates_later or replays_later

    @property
    def allocates_later(self) -> bool:
        """Whether the allocator came with the job."""
        return self._allocation is not None and self._allocation.slow

    def may_be_over(self, group: GroupRecord) -> bool:
        """Whether `over` has to be asked of a group of which episodes have finished."""
        closes_early = self._allocation is not None and self._allocation.closes_early
        return group.complete or (closes_early and not group.is_eval and not group.closed)

    async def over(self, group: GroupRecord, new: Sequence[int]) -> GroupDecision | Over | None:
        """Whether a group is over, or gets another wave; None: it waits for its episodes.

        `new`: episodes that have just finished, in order.

        Raises:
            UnavailableError: an allocator that came with the job cannot be called for now.
        """
        if self._allocation is None or group.is_eval or group.closed:
            return Over() if group.complete else None
        try:
            for count in range(1, len(new) + 1):
                late = tuple(new[count:])  # as if they had not finished yet
                if not late and group.complete:
                    break
                if await self._allocation.enough(group.without(late)):
                    return Over(late)
            if not group.complete:
                return None
            if wave := await self._allocation.more(group, self._core.state.step):
                return GroupDecision(group.group_id, MORE, wave=wave)
        except InvalidError as error:
            return self._invalid(group, error)
        return Over()

    async def decision(self, group: GroupRecord) -> GroupDecision:
        """What becomes of a group that is over, according to replay and filters."""
        offered, stored = Offered(group), ()
        try:
            if self._replay is not None:
                offered = await self._replay.offer(group)
                stored = await self._replay.keep(group)
            finished = offered.group.finished()
            found = await self._filters.decision(
                finished_group(offered.group),
                repairable=len(finished) if group.repairs < MAX_REPAIRS else 0,
            )
        except InvalidError as error:
            log.exception(
                "a filter or replay has failed", job=self._core.job_id, group=group.group_id
            )
            return self._invalid(group, error)
        # Filters know the finished episodes only, by their place among them; guests come last.
        if again := tuple(finished[place] for place in found.repair):
            return GroupDecision(group.group_id, MORE, wave=repeated(group, again), repaired=again)
        kept = {finished[place] for place in found.kept if place < len(finished)}
        if not kept:
            why = found.reason or "only replayed"
            return GroupDecision(
                group.group_id,
                DropReason.FILTERED,
                outcome=self._told(group, kept=None),
                filtered_for=filter_reason(self._core.state.counts, why),
                stored=stored,
            )
        guests = [n - len(finished) for n in found.kept if n >= len(finished)]
        joined = tuple(offered.group.guests[n] for n in guests)
        replaced = offered.replaced if joined else ()
        return GroupDecision(
            group.group_id,
            EpisodeState.READY,
            left_out=tuple(i for i in group.finished() if i not in kept and i not in replaced),
            outcome=self._told(group, kept=kept, guests=joined),
            guests=joined,
            replaced=replaced,
            stored=stored,
        )

    def outcome_of_given_up(self, group: GroupRecord, reason: DropReason) -> str:
        """What is told of a group that is dropped before it was decided, and comes no more."""
        return given_up(group, reason) if self._tells_of(group) else ""

    def _told(
        self,
        group: GroupRecord,
        *,
        kept: Collection[int] | None,
        guests: Sequence[StoredRecord] = (),
    ) -> str:
        return observed(group, kept=kept, guests=guests) if self._tells_of(group) else ""

    def _tells_of(self, group: GroupRecord) -> bool:
        return self._observe and not group.is_eval and not group.seen

    def _invalid(self, group: GroupRecord, error: InvalidError) -> GroupDecision:
        detail = clipped(error.message, self._core.limits.settings.reason_bytes)
        return GroupDecision(group.group_id, DropReason.INVALID, detail=detail)
