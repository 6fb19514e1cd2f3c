"""Tasks from rows of data and from other environments, mixed by weight."""

from __future__ import annotations

import inspect
import json
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from paceline.data import JobData
from paceline.environments.dataset.options import DatasetOptions, SourceOptions
from paceline.environments.dataset.world import mixable
from paceline.errors import InvalidError
from paceline.platform.digest import Permutation, task_id
from paceline.plugins import TaskSource
from paceline.types import Task

ENVIRONMENT = "dataset"
_MAX_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class _Part:
    """The tasks of a source that are in the split, by their rank."""

    size: int
    weight: float
    task: Callable[[int], Task]
    where: Callable[[int], str]


class DatasetTasks:
    """A task source over all sources of the options.

    An epoch has `size` tasks, of each source its share: a source with fewer rows repeats them, one
    with more leaves some out. By default no row is left out. Nothing is drawn at random: which task
    is at a position is a function of options, files and seed.
    """

    def __init__(self, seed: int = 0, *, data: JobData, **options: Any) -> None:
        """`data`: what the job may read.

        Raises:
            InvalidError: a source cannot be read, a row is wrong, or none is in the split.
        """
        wanted = DatasetOptions.model_validate(options)
        self.digests: dict[str, str] = {}
        """SHA-256 of the files of each source, by its path."""
        self.names = [e.name or e.environment or e.path or "data" for e in wanted.sources]
        """Names of the sources."""
        self._parts = [
            self._part(source, wanted.field_of(at, options=data.options_field), wanted, data, seed)
            for at, source in enumerate(wanted.sources)
        ]
        total = math.fsum(part.weight for part in self._parts)
        shares = [part.weight / total for part in self._parts]
        sized = zip(self._parts, shares, strict=True)
        whole = max(math.ceil(part.size / share - 1e-9) for part, share in sized)
        self._size = min(whole, _MAX_SIZE) if wanted.size is None else wanted.size
        ends = [round(self._size * end) for end in accumulate(shares)]
        self._ends = [*ends[:-1], self._size]
        is_mixed = wanted.order == "mixed"
        self._order = Permutation(self._size, (seed, "order")) if is_mixed else None
        self._ranks = [
            Permutation(part.size, (seed, "rows", at)) if is_mixed else None
            for at, part in enumerate(self._parts)
        ]

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position.

        Raises:
            InvalidError: its row has changed since the job was submitted.
        """
        part, rank = self._at(position)
        return part.task(rank)

    def where(self, position: int, /) -> str:
        """The user's name of the task at a position: its row and file."""
        part, rank = self._at(position)
        return part.where(rank)

    def _at(self, position: int) -> tuple[_Part, int]:
        """The source of the task at a position, and its rank there."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        place = self._order(position) if self._order else position
        at = bisect_right(self._ends, place)
        part, permuted = self._parts[at], self._ranks[at]
        rank = (place - (self._ends[at - 1] if at else 0)) % part.size
        return part, permuted(rank) if permuted else rank

    def counts(self) -> list[tuple[int, int]]:
        """For each source: its distinct tasks in the split, and its tasks in an epoch."""
        starts = [0, *self._ends]
        sizes = [end - start for start, end in zip(starts, self._ends, strict=False)]
        return [(part.size, size) for part, size in zip(self._parts, sizes, strict=True)]

    def _part(
        self, origin: SourceOptions, field: str, wanted: DatasetOptions, data: JobData, seed: int
    ) -> _Part:
        if origin.environment:
            source = _environment_tasks(origin, wanted.split, seed, field=field)
            weight, name = origin.weight or len(source), origin.environment
            return _Part(len(source), weight, source.__getitem__, lambda at: f"{name} task {at}")
        rows = data.rows(origin.path, origin.shape, field=field)
        self.digests[origin.path or "data"] = rows.digest
        ranks = range(len(rows))
        if wanted.split != "all":
            heldout = rows.heldout(wanted.heldout_share)
            ranks = (heldout if wanted.split == "heldout" else ~heldout).nonzero()[0]
        if not len(ranks):
            raise InvalidError(
                f"{field}: none of the {len(rows)} rows of {rows.name} is in the split "
                f"{wanted.split!r} with heldout_share {wanted.heldout_share:g}; change it, or "
                "give files of their own to train and held-out tasks, with split: all"
            )
        domain = "/".join(filter(None, (ENVIRONMENT, origin.name)))

        def task(rank: int) -> Task:
            payload = json.dumps(rows[int(ranks[rank])], ensure_ascii=False)
            return Task(task_id(ENVIRONMENT, payload, 0), ENVIRONMENT, payload, domain=domain)

        def where(rank: int) -> str:
            return f"row {int(ranks[rank])} of {rows.name}"

        return _Part(len(ranks), origin.weight or len(ranks), task, where)


def _environment_tasks(wanted: SourceOptions, split: str, seed: int, *, field: str) -> TaskSource:
    """The tasks of an environment; its split is that of the mixture if it has one of that name."""
    try:
        make = mixable(wanted.environment).load_tasks()
    except InvalidError as error:
        why = error.message.removeprefix("environments: ")
        raise InvalidError(f"{field}.environment: {why}") from None
    options = dict(wanted.options)
    if split != "all" and "split" in inspect.signature(make).parameters:
        options.setdefault("split", split)
    source = make(seed=seed, **options)
    if not len(source):
        raise InvalidError(f"{wanted.environment} with options {options} has no tasks")
    return source
