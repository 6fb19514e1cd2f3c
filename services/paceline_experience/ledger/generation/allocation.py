"""How many episodes a group has: waves of an allocator, and the mean size of groups."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, overload

from paceline.config import JobSpec
from paceline.errors import InvalidError, plugin_boundary
from paceline.plugins import (
    MAX_NAMED_TASKS,
    MAX_STARTS_BYTES,
    MAX_WAVE,
    MAX_WAVES,
    Allocator,
    ClosesEarly,
    Context,
    FinishedEpisode,
    FinishedTurn,
    Limits,
    OpenGroup,
    Pick,
    Start,
)
from paceline.telemetry.logs import Log
from paceline.types import EpisodeStart
from paceline_experience.ledger.records import EpisodeSummary
from paceline_experience.ledger.state import GroupRecord
from paceline_experience.ledger.task_cursor import Draw, pick_text

_SIZES = 100  # groups of which the mean size is taken
_MAX_TEMPERATURE = 100.0  # as for `sampling.temperature`
_PLAIN = Start()
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


class Allocation:
    """Calls a job's allocator; after it has failed to start a group, `problem` says why."""

    def __init__(self, spec: JobSpec, plugin: Allocator) -> None:
        assert spec.experience.allocator is not None
        self._plugin = plugin
        self._closing = plugin if isinstance(plugin, ClosesEarly) else None
        self._label = f"experience.allocator: {spec.experience.allocator.kind}"
        self._context = Context(0, spec.stop.steps, spec.tasks.seed)
        self.problem = ""

    def start(self, drawn: Draw, step: int) -> Wave | None:
        """The first wave of a group; None: the allocator has failed."""
        try:
            with self._boundary():
                starts = self._plugin.start(_pick(drawn.position, drawn.pick), self._at(step))
                return _wave(starts, before=(), finished={}, least=1)
        except InvalidError as error:
            self.problem = self.problem or error.message
            return None

    def attempt(self, drawn: Draw) -> None:
        """Try the allocator on a group of which the first episode failed and the others succeeded.

        Raises:
            InvalidError: it has failed.
        """
        wave = self.start(drawn, 0)
        if wave is None:
            raise InvalidError(self.problem)
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
        self.enough(replace(group, results=[results[0], *[None] * (wave.count - 1)]))
        self.more(group, 0)

    def more(self, group: GroupRecord, step: int) -> Wave | None:
        """The next wave of a group whose episodes are all finished; None: there is none.

        Raises:
            InvalidError: the allocator has failed.
        """
        if group.waves >= MAX_WAVES:
            return None
        with self._boundary():
            so_far = open_group(group)
            starts = self._plugin.more(so_far, self._at(step))
            finished = {i: found for i, found in enumerate(group.results) if found is not None}
            wave = _wave(starts, before=starts_of(group), finished=finished, least=0)
        return wave if wave.count else None

    def enough(self, group: GroupRecord) -> bool:
        """Whether to close a group with what has finished.

        Raises:
            InvalidError: the allocator has failed.
        """
        if self._closing is None:
            return False
        with self._boundary():
            return bool(self._closing.enough(open_group(group)))

    def _at(self, step: int) -> Context:
        return replace(self._context, step=step)

    def _boundary(self) -> AbstractContextManager[None]:
        report = partial(log.exception, "an allocator has failed", allocator=self._label)
        return plugin_boundary(self._label, report=report)


def open_group(group: GroupRecord) -> OpenGroup:
    """A group as its allocator sees it."""
    return OpenGroup(
        pick=_pick(group.position, group.pick),
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
        return [_PLAIN] * len(group.states)
    return [_parsed(fields) for count, fields in json.loads(group.starts) for _ in range(count)]


def episode_starts(group: GroupRecord, indices: Sequence[int]) -> tuple[EpisodeStart, ...]:
    """What workers are told of these episodes; empty if nothing is special about the group."""
    if not group.starts and not group.pick:
        return ()
    starts, pick = starts_of(group), _pick(group.position, group.pick)
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
    return Wave(len(indices), _encoded([*starts, *(starts[index] for index in indices)]))


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


def _pick(task: int, text: str) -> Pick:
    fields: dict[str, Any] = json.loads(text) if text else {}
    return Pick(task, **fields)


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


def _wave(
    starts: Any, *, before: Sequence[Start], finished: Mapping[int, EpisodeSummary], least: int
) -> Wave:
    """Check what an allocator has returned."""
    found = list(islice(starts, MAX_WAVE + 1))
    if not least <= len(found) <= MAX_WAVE:
        raise ValueError(f"{len(found)} episodes; {least} to {MAX_WAVE} are allowed in a wave")
    for start in found:
        if not isinstance(start, Start):
            raise TypeError(f"a start of type {type(start).__name__}; Start is needed")
        pick_text(start.variant, start.meta)
        _check(start.limits)
        if start.parent is not None:
            _check_parent(start.parent, finished)
    _check_named([*before, *found])
    return Wave(len(found), _encoded([*before, *found]))


def _trial(index: int) -> EpisodeSummary:
    reward = float(index > 0)
    return EpisodeSummary(1, reward, False, 2, 4, 0, 1, turns=((3, reward, 0), (4, 0.0, 0)))


def _check(limits: Limits) -> None:
    numbers: list[tuple[str, Any]] = [
        ("max_turns", limits.max_turns),
        ("max_tokens", limits.max_tokens),
    ]
    for name, value in numbers:
        if value is not None and (not isinstance(value, int) or not 0 < value < 1 << 31):
            raise ValueError(f"limit {name} is {value!r}; a positive integer is needed")
    heat = limits.temperature
    if heat is not None and not 0.0 < heat <= _MAX_TEMPERATURE:
        raise ValueError(f"temperature {heat!r}; more than 0 and at most {_MAX_TEMPERATURE} is due")


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


def _encoded(starts: Sequence[Start]) -> str:
    """Runs of equal starts as JSON: [[count, what is not a default], ...]; empty: all defaults."""
    if all(start is _PLAIN or start == _PLAIN for start in starts):
        return ""
    runs: list[tuple[int, dict[str, Any]]] = []
    for fields in map(_fields, starts):
        if runs and runs[-1][1] == fields:
            runs[-1] = (runs[-1][0] + 1, fields)
        else:
            runs.append((1, fields))
    text = json.dumps(runs, allow_nan=False)
    if len(text) > MAX_STARTS_BYTES:
        raise ValueError(
            f"the starts of the group have {len(text)} bytes; at most {MAX_STARTS_BYTES} are kept"
        )
    return text


def _fields(start: Start) -> dict[str, Any]:
    limits = {name: value for name, value in asdict(start.limits).items() if value is not None}
    every: dict[str, Any] = {
        "variant": start.variant,
        "parent": list(start.parent) if start.parent else None,
        "limits": limits,
        "meta": dict(start.meta),
        "tasks": list(start.tasks),
    }
    return {name: value for name, value in every.items() if value}


def _parsed(fields: Mapping[str, Any]) -> Start:
    if not fields:
        return _PLAIN
    parent = fields.get("parent")
    return Start(
        variant=fields.get("variant", ""),
        parent=(parent[0], parent[1]) if parent else None,
        limits=Limits(**fields.get("limits", {})),
        meta=fields.get("meta", {}),
        tasks=tuple(fields.get("tasks", ())),
    )
