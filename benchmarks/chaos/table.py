"""Results of a campaign, by kind of fault and in total."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from chaos.accounting import COLUMNS, OTHERS
from chaos.naming import Named
from chaos.runner import Told


def table(told: Told) -> dict[str, Any]:
    """Counts by kind and in total, recovery and restart times, jobs, and findings."""
    names = sorted({each.kind for each in told.injected} | {kind for kind, _ in told.breaches})
    rows = {name: _row(told, [name]) for name in names}
    restarts = {
        service: _spread(
            each.restart_s for each in told.injected if each.restarts.startswith(service)
        )
        for service in ("rollout", "trainer")
    }
    return {
        "total": _row(told, names),
        "kinds": rows,
        "restarts": restarts,
        "jobs": told.jobs,
        "findings": [
            {"after": kind, "column": breach.column, "count": breach.count, "text": breach.text}
            for kind, breach in told.breaches
        ],
        "no_sign_in_time": [
            f"{each.kind}: {each.about} ({each.job_id})" for each in told.injected if each.late
        ],
        "left_out": told.left_out,
        "without_target": told.without_target,
    }


def table_of_names(named: Sequence[Named]) -> dict[str, Any]:
    """Seconds until the status named the culprit, by kind, and over all kinds."""
    return {
        "named": [
            {"kind": e.kind, "seconds": e.seconds and round(e.seconds, 2), "words": e.words[:300]}
            for e in named
        ],
        "named_s": _spread(each.seconds for each in named),
        "not_named": [each.kind for each in named if each.seconds is None],
    }


def _row(told: Told, names: Sequence[str]) -> dict[str, Any]:
    mine = [each for each in told.injected if each.kind in names]
    counts = dict.fromkeys((*COLUMNS, *OTHERS), 0)
    for kind, breach in told.breaches:
        if kind in names:
            counts[breach.column] += breach.count
    row: dict[str, Any] = {"injected": len(mine), **counts}
    if len(names) == 1:
        row["recovery_s"] = _spread(each.recovered_s for each in mine)
        row["no_sign_in_time"] = sum(each.late for each in mine)
    return row


def _spread(values: Iterable[float | None]) -> dict[str, Any]:
    """Count, median, 90th percentile and maximum of the measured values."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return {"measured": 0, "median": None, "p90": None, "max": None}
    p90 = found[min(len(found) - 1, round(0.9 * (len(found) - 1)))]
    return {
        "measured": len(found),
        "median": round(statistics.median(found), 2),
        "p90": round(p90, 2),
        "max": round(found[-1], 2),
    }
