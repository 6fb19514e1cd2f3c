"""Contract tests for advantages; need numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.needs import GROUP
from paceline.config.options import options_source
from paceline.plugins import Advantage, declared
from paceline.testing.common import expect, resolved

Floats = NDArray[np.float64]
BATCHES: tuple[tuple[Sequence[float], Sequence[int]], ...] = (
    ((0.0, 1.0, 1.0, 0.0), (0, 0, 1, 1)),
    ((1.0, 1.0, 1.0, 1.0), (0, 0, 0, 0)),
    ((1e9, -1e9, 1e-9), (2, 2, 2)),
    ((0.1, 0.2, 0.3, 0.4, 0.5), (7, 3, 7, 3, 7)),
)
ALONE: tuple[Sequence[float], Sequence[int]] = ((0.5,), (0,))


def fulfils_the_contract(plugin: str | Advantage, options: Mapping[str, Any] | None = None) -> None:
    """Check for one finite number per episode, whatever the group numbers, and unchanged inputs.

    An advantage that does not declare that it needs groups is also called with a single episode.
    """
    estimate: Advantage = resolved("advantages", plugin)
    given = dict(options or {})
    told = (
        options_source("advantages", plugin, import_plugin=True)
        if isinstance(plugin, str)
        else plugin
    )
    alone = () if GROUP in declared(told).needs_with(given) else (ALONE,)
    for rewards, groups in (*BATCHES, *alone):
        found = _estimated(estimate, rewards, groups, given)
        renamed = _estimated(estimate, rewards, [100 - each for each in groups], given)
        expect(np.allclose(found, renamed), f"renumbering {groups} changes {found} to {renamed}")


def _estimated(
    estimate: Advantage, rewards: Sequence[float], groups: Sequence[int], options: dict[str, Any]
) -> Floats:
    given = (
        np.array(rewards, dtype=np.float64),
        np.array(groups, dtype=np.int64),
        np.arange(1, len(rewards) + 1, dtype=np.int64),
    )
    kept = [each.copy() for each in given]
    found = np.asarray(estimate(*given, **options), dtype=np.float64)
    expect(
        all(np.array_equal(a, b) for a, b in zip(given, kept, strict=True)),
        "it modifies its input arrays",
    )
    expect(found.shape == given[0].shape, f"shape {found.shape} for {len(rewards)} episodes")
    finite = np.abs(found) <= np.finfo(np.float32).max
    expect(finite.all(), f"{found} for rewards {rewards}; expected finite float32 numbers")
    return found
