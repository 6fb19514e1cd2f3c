"""Asks a job's replay which episodes to store and which join a group, and plans its pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.plugins import Context
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.filters.chain import finished_group
from paceline_experience.ledger.generation.submission import Submission
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.records import EpisodeSummary
from paceline_experience.ledger.replay.asked import AskedReplay, asked_replay
from paceline_experience.ledger.replay.pool import StoredRecord, world_digest
from paceline_experience.ledger.state import DROPPED, GroupRecord


@dataclass(frozen=True, slots=True)
class Offered:
    """A group as filters see it, with its guests and without what they replace."""

    group: GroupRecord
    replaced: tuple[int, ...] = ()  # indices of episodes


class ReplayStage:
    """Asks the replay of a job. The pool changes in the scripts that decide on groups."""

    def __init__(self, core: LedgerContext, plugin: AskedReplay) -> None:
        found = core.spec.experience.replay
        assert found is not None
        self._core, self._spec, self._plugin = core, found, plugin
        self._world = world_digest(core.spec)
        self._context = Context(0, core.spec.stop.steps, core.spec.tasks.seed)

    @property
    def slow(self) -> bool:
        """Whether it came with the job, so that answers may be a long time coming."""
        return self._plugin.slow

    async def offer(self, group: GroupRecord) -> Offered:
        """The group with its guests.

        Raises:
            InvalidError: the replay has failed.
            UnavailableError: it came with the job, and cannot be called for now.
        """
        if group.is_eval:
            return Offered(group)
        pool = self._core.state.pool
        stored = pool.of(group.position, before=group.seq, world=self._world)
        if not stored:
            return Offered(group)
        finished = group.finished()
        shown = [each.stored() for each in stored]
        guests = await self._plugin.offer(finished_group(group), shown, self._now())
        replaced = tuple(sorted(finished[g.replaces] for g in guests if g.replaces is not None))
        states = "".join(DROPPED if i in replaced else s for i, s in enumerate(group.states))
        results = [None if i in replaced else found for i, found in enumerate(group.results)]
        joined = tuple(stored[guest.stored] for guest in guests)
        return Offered(replace(group, states=states, results=results, guests=joined), replaced)

    async def keep(self, group: GroupRecord) -> tuple[int, ...]:
        """Indices of the episodes of a decided group that are stored; raises as `offer`."""
        if group.is_eval:
            return ()
        finished = group.finished()
        places = await self._plugin.keep(finished_group(group), self._now())
        return tuple(finished[place] for place in places)

    def changes(self, group: GroupRecord, indices: Sequence[int]) -> dict[str, object]:
        """Put episodes into the pool; returns what `decide.lua` has to be told at once."""
        if not indices:
            return {}
        state, names = self._core.state, group.payload_names()
        found = [(index, group.results[index]) for index in indices]
        change, lost = state.pool.put(
            (
                self._record(group, index, result, names[index])
                for index, result in found
                if result is not None
            ),
            per_task=self._spec.per_task,
            max_bytes=self._spec.pool_bytes,
        )
        state.unpinned |= lost
        return {"stored": change.stored, "evicted": change.evicted}

    def settled(self, *, unfixed: int) -> list[str]:
        """Keys that leave the pool as a batch is fixed; `unfixed` is the step of the next one."""
        state = self._core.state
        change, lost = state.pool.settle(
            unfixed=unfixed, per_task=self._spec.per_task, max_bytes=self._spec.pool_bytes
        )
        state.unpinned |= lost
        return change.evicted

    def taken_back(self, groups: Iterable[GroupRecord]) -> list[dict[str, object]]:
        """What `decide.lua` has to be told when these groups are generated again."""
        state = self._core.state
        change, lost = state.pool.take_back({group.seq for group in groups})
        state.unpinned |= lost
        return [{"stored": {}, "evicted": change.evicted}] if change.evicted else []

    def brought(self, imported: Iterable[tuple[int, Submission]]) -> dict[str, object]:
        """What `decide.lua` has to be told of imported trajectories, by position of their task.

        They come before all draws, so the job's own episodes take their places.
        """
        state = self._core.state
        records = [
            StoredRecord(
                task=task,
                seq=-1,
                index=each.report.index,
                step=state.unfixed_step() - 1,
                payload=each.name,
                world=self._world,
                result=each.report.result,
            )
            for task, each in imported
            if each.report.result is not None
        ]
        change, lost = state.pool.bring(
            records, per_task=self._spec.per_task, max_bytes=self._spec.pool_bytes
        )
        state.unpinned |= lost
        return {"stored": change.stored, "evicted": change.evicted}

    async def clear(self) -> None:
        """Inside a transaction: forget everything; the job is over."""
        state = self._core.state
        if len(state.pool):
            change, lost = state.pool.clear()
            state.unpinned |= lost
            await self._core.decide([{"stored": {}, "evicted": change.evicted}])

    async def unused(self, names: Iterable[str], *, let_go: Iterable[str]) -> list[str]:
        """Which of these payloads nobody needs, and of those that are or were let go.

        What is let go may be a trained trajectory by now, which stays while it is listed.
        """
        state = self._core.state
        free = [name for name in names if not state.pinned(name)]
        let_go = {name for name in {*state.unpinned, *let_go} if not state.pinned(name)}
        state.unpinned = set()
        let_go = {name for name in let_go if not state.owns(name)}.difference(free)
        if let_go:
            ordered = sorted(let_go)
            ring = self._core.keys.ring
            scores = await self._core.store.command("ZMSCORE", ring, *ordered)
            free += [n for n, score in zip(ordered, scores, strict=True) if score is None]
        return free

    def _record(
        self, group: GroupRecord, index: int, result: EpisodeSummary, payload: str
    ) -> StoredRecord:
        return StoredRecord(
            task=group.position,
            seq=group.seq,
            index=index,
            step=self._core.state.unfixed_step(),
            payload=payload,
            world=self._world,
            result=replace(result, turns=()),
        )

    def _now(self) -> Context:
        return replace(self._context, step=self._core.state.step)


def replay_stage(core: LedgerContext, own: OwnParts = NO_PARTS) -> ReplayStage | None:
    """The stage of a job with a replay; `own` calls that of its code."""
    plugin = asked_replay(core.spec, own)
    return None if plugin is None else ReplayStage(core, plugin)
