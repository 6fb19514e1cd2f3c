"""How many episodes a group has: waves of an allocator, and the mean size of groups."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, overload

from paceline.errors import InvalidError, plugin_boundary
from paceline.isolation.code.generation.starts import (
    PLAIN,
    checked_starts,
    pick_of,
    runs_text,
    starts_of_runs,
)
from paceline.platform.telemetry.logs import Log
from paceline.plugins import (
    MAX_NAMED_TASKS,
    MAX_WAVES,
    Allocator,
    ClosesEarly,
    Context,
    FinishedEpisode,
    FinishedTurn,
    OpenGroup,
    Pick,
    Start,
)
from paceline.types import EpisodeStart
from paceline_experience.ledger.records import EpisodeSummary
from paceline_experience.ledger.state import GroupRecord
from paceline_experience.ledger.task_cursor import Draw

_SIZES = 100  # groups of which the mean size is taken
log = Log("allocation")


class GroupSizes:
    """The mean size of the last 100 groups; what is expected until one is seen."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._seen: deque[int] = deque(maxlen=_SIZES)

    def add(self, size: int) -> None:
        """A group was closed with this many episodes."""
        self._seen.append(size)

    def mean(self) -> int:
        """Rounded up."""
        return -(-sum(self._seen) // len(self._seen)) if self._seen else self._expected


@dataclass(frozen=True, slots=True)
class Wave:
    """Episodes to begin, and the starts of all episodes of the group as its record keeps them."""

    count: int
    starts: str


class Allocation(Protocol):
    """The allocator of a job, wherever it runs."""

    slow: bool
    """Whether answers may be a long time coming: it came with the job."""
    closes_early: bool
    """Whether groups need not wait for all their episodes."""

    @property
    def problem(self) -> str:
        """Why no group can be started any more, so that the job fails; empty: they can."""
        ...

    def start(self, drawn: Draw, step: int) -> Wave | None:
        """The first wave of a group; None: it has failed, or is `slow` and asked just now."""
        ...

    async def begun(self, drawn: Draw, step: int) -> Wave:
        """The first wave of a group.

        Raises:
            InvalidError: the allocator has failed.
            UnavailableError: it came with the job, and cannot be called for now.
        """
        ...

    async def more(self, group: GroupRecord, step: int) -> Wave | None:
        """The next wave of a group whose episodes are all finished; None: there is none.

        Raises as `begun`.
        """
        ...

    async def enough(self, group: GroupRecord) -> bool:
        """Whether to close a group with what has finished; raises as `begun`."""
        ...


class InstalledAllocation:
    """Calls an installed allocator; after it has failed to start a group, `problem` says why."""

    slow = False

    def __init__(self, plugin: Allocator, *, kind: str, context: Context) -> None:
        self._plugin = plugin
        self._closing = plugin if isinstance(plugin, ClosesEarly) else None
        self.closes_early = self._closing is not None
        self._label = f"experience.allocator: {kind}"
        self._context = context
        self.problem = ""

    def start(self, drawn: Draw, step: int) -> Wave | None:
        """See `Allocation`."""
        try:
            with self._boundary():
                starts = self._plugin.start(pick_of(drawn.position, drawn.pick), self._at(step))
                return first_wave(starts)
        except InvalidError as error:
            self.problem = self.problem or error.message
            return None

    async def begun(self, drawn: Draw, step: int) -> Wave:
        """See `Allocation`."""
        if (wave := self.start(drawn, step)) is None:
            raise InvalidError(self.problem)
        return wave

    async def more(self, group: GroupRecord, step: int) -> Wave | None:
        """See `Allocation`."""
        if group.waves >= MAX_WAVES:
            return None
        with self._boundary():
            return next_wave(self._plugin.more(open_group(group), self._at(step)), group)

    async def enough(self, group: GroupRecord) -> bool:
        """See `Allocation`."""
        if self._closing is None:
            return False
        with self._boundary():
            return bool(self._closing.enough(open_group(group)))

    def _at(self, step: int) -> Context:
        return replace(self._context, step=step)

    def _boundary(self) -> AbstractContextManager[None]:
        report = partial(log.exception, "an allocator has failed", allocator=self._label)
        return plugin_boundary(self._label, report=report)


async def attempt(allocation: Allocation, drawn: Draw) -> None:
    """Try an allocator on a group of which the first episode failed and the others succeeded.

    Raises:
        InvalidError: it has failed.
    """
    wave = await allocation.begun(drawn, 0)
    results = [_trial(index) for index in range(wave.count)]
    group = GroupRecord(
        group_id="trial",
        seq=0,
        position=drawn.position,
        states="f" * wave.count,
        attempts=[1] * wave.count,
        workers=[""] * wave.count,
        results=results,
        num_requeues=0,
        version=-1,
        deadlines=[0.0] * wave.count,
        pick=drawn.pick,
        starts=wave.starts,
    )
    await allocation.enough(replace(group, results=[results[0], *[None] * (wave.count - 1)]))
    await allocation.more(group, 0)


def open_group(group: GroupRecord) -> OpenGroup:
    """A group as its allocator sees it."""
    return OpenGroup(
        pick=pick_of(group.position, group.pick),
        episodes=_Episodes(group),
        num_open=group.states.count("q") + group.states.count("l"),
        waves=group.waves,
    )


class _Episodes(Sequence[FinishedEpisode]):
    """Finished episodes, which are made if they are looked at: many allocators only count them."""

    def __init__(self, group: GroupRecord) -> None:
        self._group = group
        self._size = len(group.results) - group.results.count(None)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int, /) -> FinishedEpisode: ...
    @overload
    def __getitem__(self, index: slice, /) -> Sequence[FinishedEpisode]: ...
    def __getitem__(self, index: int | slice, /) -> FinishedEpisode | Sequence[FinishedEpisode]:
        return self._made[index]

    def __iter__(self) -> Iterator[FinishedEpisode]:
        return iter(self._made)

    @cached_property
    def _made(self) -> tuple[FinishedEpisode, ...]:
        starts = starts_of(self._group)
        return tuple(
            _episode(index, starts[index], found)
            for index, found in enumerate(self._group.results)
            if found is not None
        )


def starts_of(group: GroupRecord) -> list[Start]:
    """The start of each episode."""
    if not group.starts:
        return [PLAIN] * len(group.states)
    return starts_of_runs(json.loads(group.starts), most=len(group.states))


def episode_starts(group: GroupRecord, indices: Sequence[int]) -> tuple[EpisodeStart, ...]:
    """What workers are told of these episodes; empty if nothing is special about the group."""
    if not group.starts and not group.pick:
        return ()
    starts, pick = starts_of(group), pick_of(group.position, group.pick)
    places = {task: place for place, task in enumerate(named_tasks(group, indices))}
    return tuple(_told(starts[index], pick, places) for index in indices)


def named_tasks(group: GroupRecord, indices: Sequence[int]) -> tuple[int, ...]:
    """Positions of the other tasks that these episodes are given, each once."""
    if "tasks" not in group.starts:
        return ()
    starts = starts_of(group)
    return tuple(dict.fromkeys(task for index in indices for task in starts[index].tasks))


def repeated(group: GroupRecord, indices: Sequence[int]) -> Wave:
    """Begin these episodes once more, as new ones at the end of their group."""
    starts = starts_of(group)
    return Wave(len(indices), runs_text([*starts, *(starts[index] for index in indices)]))


def _told(start: Start, pick: Pick, places: Mapping[int, int]) -> EpisodeStart:
    limits = start.limits
    parent, tokens = start.parent or (-1, 0)
    meta = {**pick.meta, **start.meta}
    return EpisodeStart(
        variant=start.variant or pick.variant,
        meta=json.dumps(meta) if meta else "",
        parent=parent,
        parent_tokens=tokens,
        max_turns=limits.max_turns or 0,
        max_tokens=limits.max_tokens or 0,
        temperature=limits.temperature or 0.0,
        tasks=tuple(places[task] for task in start.tasks),
    )


def _episode(index: int, start: Start, found: EpisodeSummary) -> FinishedEpisode:
    return FinishedEpisode(
        index=index,
        start=start,
        reward=found.reward,
        answer=found.answer,
        length=found.policy_tokens,
        truncated=found.truncated,
        parts=found.parts,
        turns=tuple(
            FinishedTurn(end, reward, bool(flags & 1), bool(flags & 2), bool(flags & 4))
            for end, reward, flags in found.turns
        ),
    )


def first_wave(starts: Any) -> Wave:
    """The first wave of a group, from what an allocator has returned; it may raise anything."""
    return _wave(starts, before=(), finished={}, least=1)


def next_wave(starts: Any, group: GroupRecord) -> Wave | None:
    """Another wave of a group; None: there is none. It may raise anything."""
    finished = {i: found for i, found in enumerate(group.results) if found is not None}
    wave = _wave(starts, before=starts_of(group), finished=finished, least=0)
    return wave if wave.count else None


def _wave(
    starts: Any, *, before: Sequence[Start], finished: Mapping[int, EpisodeSummary], least: int
) -> Wave:
    """Check what an allocator has returned."""
    found = checked_starts(starts, least=least)
    for start in found:
        if start.parent is not None:
            _check_parent(start.parent, finished)
    _check_named([*before, *found])
    return Wave(len(found), runs_text([*before, *found]))


def _trial(index: int) -> EpisodeSummary:
    reward = float(index > 0)
    return EpisodeSummary(1, reward, False, 2, 4, 0, 1, turns=((3, reward, 0), (4, 0.0, 0)))


def _check_parent(parent: tuple[Any, Any], finished: Mapping[int, EpisodeSummary]) -> None:
    index, tokens = parent
    sibling = finished.get(index)
    if sibling is None:
        raise ValueError(f"parent {index} is no finished episode of the group")
    if not isinstance(tokens, int) or not 0 < tokens <= sibling.tokens:
        raise ValueError(f"{tokens!r} tokens of parent {index}, which has {sibling.tokens}")


def _check_named(starts: Sequence[Start]) -> None:
    named: set[Any] = {task for start in starts for task in start.tasks}
    if not all(isinstance(task, int) and task >= 0 for task in named):
        raise ValueError("a start names tasks that are no positions")
    if len(named) > MAX_NAMED_TASKS:
        raise ValueError(f"{len(named)} other tasks; a group may have {MAX_NAMED_TASKS} at most")
