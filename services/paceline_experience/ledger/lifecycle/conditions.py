"""Conditions of `stop.when`: each row of the history is looked at once, in order.

How far that has come is written together with the end that follows from it, so a restart neither
counts a row twice nor misses one. A step that is trained again after a rewind does not count again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from paceline.config.lifecycle.stopping import StopCondition
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.records import WatchRecord

_ROWS = 1000  # read at once


class Conditions:
    """Follows the rows of a job's history."""

    def __init__(self, core: LedgerContext) -> None:
        self._core = core
        self._conditions = core.spec.stop.when
        self._seen: tuple[int, int] | None = None  # rows written and revision when all were seen

    async def met(self) -> tuple[StopCondition, WatchRecord, str] | None:
        """The first condition that is met by now, and what to write with the end; None: none is."""
        if not self._conditions:
            return None
        async with self._core.transaction() as state:
            now = (self._core.rows_written, state.revision)
            if self._seen is not None and self._seen[0] == now[0] and self._seen[1] <= now[1]:
                return None
            while rows := await self._rows(state.meta.watch.offset):
                watch, condition, text = advanced(self._conditions, state.meta.watch, rows)
                if condition is not None:
                    return condition, watch, text
                await self._core.note(watch=watch)
            self._seen = (now[0], state.revision)
        return None

    async def _rows(self, offset: int) -> list[dict[str, Any]]:
        key, last = self._core.keys.metrics, offset + _ROWS - 1
        found: list[bytes] = await self._core.store.command("LRANGE", key, offset, last)
        return [json.loads(text) for text in found]


def advanced(
    conditions: Sequence[StopCondition], watch: WatchRecord, rows: Iterable[Mapping[str, Any]]
) -> tuple[WatchRecord, StopCondition | None, str]:
    """`watch` after these rows, or after the one that meets a condition, and which one and why."""
    for row in rows:
        watch = replace(watch, offset=watch.offset + 1)
        source = source_of(row)
        if source is None or int(row["step"]) <= watch.steps.get(source, -1):
            continue
        watch = replace(watch, steps={**watch.steps, source: int(row["step"])})
        for number, condition in enumerate(conditions):
            value = value_of(condition.metric, source, row["values"])
            if value is None:
                continue
            streak = watch.streaks.get(number, 0) + 1 if condition.holds(value) else 0
            watch = replace(watch, streaks={**watch.streaks, number: streak})
            if streak >= condition.rows:
                return watch, condition, f"{condition}: {value:g} at step {row['step']}"
    return watch, None, ""


def source_of(row: Mapping[str, Any]) -> str | None:
    """`train`, `eval` or `eval/NAME`; None: an eval that has measured too little to count."""
    values = row["values"]
    if row["kind"] == "eval" and not values.get("complete", True):
        return None
    name = values.get("set", "")
    return f"{row['kind']}/{name}" if name else str(row["kind"])


def value_of(metric: str, source: str, values: Mapping[str, Any]) -> float | None:
    """The finite number at a path such as `train/kl_behaviour`; None: the row has none."""
    prefix = f"{source}/"
    if not metric.startswith(prefix):
        return None
    found: Any = values
    for part in metric.removeprefix(prefix).split("/"):
        found = cast(Mapping[str, Any], found).get(part) if isinstance(found, Mapping) else None
    is_number = isinstance(found, int | float) and math.isfinite(found)
    return float(found) if is_number else None
