"""Which of the collected tests run, in which order, and for how long at most."""

from __future__ import annotations

from pathlib import Path

import pytest

LOADED = 4  # tests name time limits for a machine with nothing else to do


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect extended tests and those of what must be installed first, unless marks are given."""
    chosen = str(config.getoption("markexpr"))
    left_out = [mark for mark in ("sglang", "adapters", "extended") if mark not in chosen]
    dropped = [item for item in items if any(map(item.get_closest_marker, left_out))]
    wanted = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=dropped)
    items[:] = longest_first(wanted)
    for item in wanted:
        if mark := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LOADED * mark.args[0]), append=False)


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files by their longest time limit, so that no worker is left with a long one at the end."""
    limits: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0), mark.args[0] if mark else 0)
    return sorted(items, key=lambda item: -limits[item.path])
