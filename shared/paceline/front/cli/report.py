"""Plots and statistics from the metric rows of a job; plots need matplotlib (`local` extra)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Curve = tuple[list[int], list[float]]


def read_metrics(path: Path) -> list[Row]:
    """The rows of a `metrics.jsonl`; a truncated last line is ignored."""
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def curve(rows: Iterable[Row], *, kind: str, name: str) -> Curve:
    """One metric over steps; of a step that was trained again, the last row counts."""
    points: dict[int, float] = {}
    for row in rows:
        value = row.get("values", row).get(name)
        if row.get("kind") == kind and isinstance(value, (int, float)):
            points[int(row["step"])] = float(value)
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def counts(row: Row) -> bool:
    """Whether a row is a valid result, unlike an eval that measured too few of its tasks."""
    return row.get("values", row).get("complete") is not False


def by_eval(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of evals by the name of the evaluation; empty: that of `eval`."""
    by_set: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("kind") == "eval":
            by_set.setdefault(row.get("values", row).get("set", ""), []).append(row)
    return by_set


def smooth(values: list[float], *, width: int) -> list[float]:
    """Mean over the last `width` values."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def draw_rewards(rows: list[Row], path: Path, *, title: str = "") -> None:
    """Plot training and held-out reward over steps, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    steps, rewards = curve(rows, kind="train", name="reward_mean")
    if steps:
        axes.plot(steps, rewards, color="#9ecae1", linewidth=0.8)
        axes.plot(steps, smooth(rewards, width=10), color="#3182bd", label="training (mean of 10)")
    for name, eval_rows in sorted(by_eval(rows).items()):
        label, color = (f"held out: {name}", None) if name else ("held out", "#e6550d")
        steps, rewards = curve(filter(counts, eval_rows), kind="eval", name="reward")
        if steps:
            axes.plot(steps, rewards, "o-", color=color, markersize=4, label=label)
    partial = [row for row in rows if not counts(row)]
    steps, rewards = curve(partial, kind="eval", name="reward")
    if steps:
        label = "held out, too few measured"
        axes.plot(steps, rewards, "x", color="#636363", markersize=4, label=label)
    axes.set_xlabel("trainer step")
    axes.set_ylabel("mean reward")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)
