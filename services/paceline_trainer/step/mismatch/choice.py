"""Chooses the sequences of a version that are computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from paceline_trainer.columns import Columns, Ints


def first_versions(data: Columns) -> Ints:
    """The version of each sequence's first policy token."""
    return data.versions[data.policy_starts[:-1]]


def first_workers(data: Columns) -> Ints:
    """The worker of each sequence's first policy token, as a place in `worker_names`."""
    return data.workers[data.policy_starts[:-1]]


def choose(
    data: Columns, version: int, *, limit: int, budget: int, checked: Mapping[str, int]
) -> tuple[Ints, Ints]:
    """Sequences that begin with long runs of a version, and the lengths of these runs.

    Workers take turns, those first that were `checked` (by name: the newest version) longest ago;
    each with its longest run. Sequences whose prompt was replaced tell nothing about the engine.
    """
    rows = np.flatnonzero((first_versions(data) == version) & ~data.replaced)
    if not len(rows):
        return rows, rows
    starts, counts = data.policy_starts[rows], data.policy_counts[rows]
    runs = np.array(
        [
            int(np.argmin(np.append(data.versions[start : start + count] == version, False)))
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
    )
    order = np.argsort(-runs, kind="stable")
    workers = first_workers(data)[rows][order]
    turns = _turns(workers)
    age = np.array([checked.get(name, -1) for name in data.worker_names])[workers]
    order = order[np.lexsort((age, turns))][:limit]
    lengths = data.positions[starts[order] + counts[order] - 1]
    fits = np.maximum.accumulate(lengths) * np.arange(1, len(order) + 1) <= budget
    fits[0] = True
    return rows[order][fits], runs[order][fits]


def _turns(workers: Ints) -> Ints:
    """How many of the sequences before are of the same worker."""
    seen = Counter[int]()
    turns = np.zeros_like(workers)
    for place, worker in enumerate(workers.tolist()):
        turns[place] = seen[worker]
        seen[worker] += 1
    return turns
