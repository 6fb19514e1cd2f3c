"""Results of a job of kind `eval`: as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from paceline.front.api.documents import JobView

DEVIATIONS = 1.96
"""Standard errors on either side of a mean that the 95 % interval reaches."""
_SHARES = ("truncated_share", "parse_error_share", "timeout_share", "text_vote_share")
_CONFIG = ("tasks", "samples", "temperature", "pass_reward", "seed", "options", "source")
_MEASURED = ("version", "weights", "endpoint", "models")
Row = Mapping[str, Any]


def name_of(row: Row) -> str:
    """The name of an evaluation; that of the section `eval` has none of its own."""
    return str(row.get("set", "")) or "eval"


def scores_of(row: Row) -> Iterator[str]:
    """Names of the scores of a set: the reward, then pass@k and maj@k by k."""
    yield "reward"
    yield from sorted(
        (name for name in row if "@" in name), key=lambda n: (n[:4] != "pass", int(n.split("@")[1]))
    )


def interval(row: Row, name: str) -> tuple[float, float] | None:
    """The 95 % interval of a score, of a share within 0 and 1; None: fewer than two tasks have one.

    Mean -+ 1.96 standard errors, which count each task once (arXiv 2411.00640).
    """
    error, mean = (row.get("stderr") or {}).get(name), row.get(name)
    if error is None or mean is None:
        return None
    low, high = mean - DEVIATIONS * error, mean + DEVIATIONS * error
    return (max(low, 0.0), min(high, 1.0)) if "@" in name else (low, high)


def document(job: JobView, rows: Sequence[Row]) -> dict[str, Any]:
    """All results, named as lm-evaluation-harness does: `results`, `configs`, `n-samples`."""
    sets = {"eval": job.spec.get("eval") or {}, **(job.spec.get("evals") or {})}
    fork = job.spec.get("fork")
    return {
        "job_id": job.status.job_id,
        "state": str(job.status.state),
        "model": job.spec["model"],
        "checkpoint": fork,
        "results": {name_of(row): dict(_values(row)) for row in rows},
        "configs": {
            name_of(row): {k: v for k, v in sets.get(name_of(row), {}).items() if k in _CONFIG}
            for row in rows
        },
        "n-samples": {
            name_of(row): {"original": row["of"], "effective": row["measured"]} for row in rows
        },
    }


def _values(row: Row) -> Iterator[tuple[str, Any]]:
    for name in scores_of(row):
        yield name, row.get(name)
        bounds = interval(row, name)
        if bounds is not None:
            yield f"{name}_stderr", row["stderr"][name]
            yield f"{name}_ci95", list(bounds)
    for name in (*_SHARES, "tokens", "response_tokens_mean", *_MEASURED, "complete"):
        if name in row:
            yield name, row[name]


def table_of(rows: Sequence[Row]) -> Table:
    """A line for each score of each set."""
    table = Table("set", "metric", "value", "95 % interval", "tasks", box=None)
    for row in rows:
        for number, score in enumerate(scores_of(row)):
            value, bounds = row.get(score), interval(row, score)
            first = number == 0
            table.add_row(
                name_of(row) if first else "",
                score,
                "-" if value is None else f"{value:.4f}",
                "-" if bounds is None else f"{bounds[0]:.4f} … {bounds[1]:.4f}",
                f"{row['measured']} of {row['of']}" if first else "",
            )
    return table
