"""Curves of metrics, and figures of them; figures need matplotlib (`paceline[plot]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from paceline.enums import Purpose
from paceline.errors import ConfigError, InvalidError
from paceline.errors.extras import installing
from paceline.front.api.documents import MetricRow
from paceline.platform.text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REWARD = "reward"
"""The training reward, and that of each evaluation."""
_PER_LINE = 2
_WIDTH, _HEIGHT = 6.0, 3.2  # inches of a panel
_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """One metric over steps; `held_out`: of an evaluation."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    held_out: bool = False


def metric_names(rows: Sequence[MetricRow]) -> list[str]:
    """Metrics that any row has as a number, and `reward`."""
    names = {name for row in rows for name, value in row.values.items() if _is_number(value)}
    return sorted(names | {REWARD})


def metric_curves(rows: Sequence[MetricRow], name: str) -> list[MetricCurve]:
    """The curves of one metric; of a step that was trained again, the last row counts.

    `reward` is the mean reward of batches, and of each evaluation that measured enough tasks.

    Raises:
        InvalidError: no row has this metric.
    """
    wanted = "reward_mean" if name == REWARD else name
    trained = [row for row in rows if row.kind is Purpose.TRAIN]
    curves = [_curve(trained, wanted, "training" if name == REWARD else name)]
    for label, measured in _by_evaluation(rows).items():
        suffix = f"held out{f': {label}' if label else ''}"
        curves.append(
            _curve(measured, name, suffix if name == REWARD else f"{name}, {suffix}", True)
        )
    curves = [curve for curve in curves if curve.steps]
    if not curves and name != REWARD:
        known = ", ".join(metric_names(rows))
        raise InvalidError(f"metric {name!r} is in no row; there are {known}")
    return curves


@dataclass(frozen=True, slots=True)
class GroupCurve:
    """A metric of several runs over the steps that all of them have."""

    label: str
    steps: tuple[int, ...]
    means: tuple[float, ...]
    spreads: tuple[float, ...]
    """Sample standard deviations over the runs; 0 for a single run."""
    held_out: bool = False


def group_curves(runs: Sequence[Sequence[MetricRow]], name: str) -> list[GroupCurve]:
    """The curves of one metric over runs that differ by their seeds, where all runs have it.

    Raises:
        InvalidError: no row of a run has this metric.
    """
    by_label: dict[str, list[MetricCurve]] = {}
    for rows in runs:
        for curve in metric_curves(rows, name):
            by_label.setdefault(curve.label, []).append(curve)
    return [_group(curves) for curves in by_label.values() if len(curves) == len(runs)]


def _group(curves: Sequence[MetricCurve]) -> GroupCurve:
    points = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    steps = tuple(sorted(set.intersection(*(set(point) for point in points))))
    columns = [[point[step] for point in points] for step in steps]
    spreads = (stdev(values) if len(values) > 1 else 0.0 for values in columns)
    means = tuple(map(mean, columns))
    return GroupCurve(curves[0].label, steps, means, tuple(spreads), curves[0].held_out)


def figure(
    jobs: Mapping[str, Sequence[MetricRow]],
    metrics: Sequence[str] = (REWARD,),
    *,
    groups: Mapping[str, Sequence[Sequence[MetricRow]]] | None = None,
    smooth: int = 1,
) -> Figure:
    """A panel for each metric, with the curves of these jobs, by their labels.

    Of each of the `groups`, runs that differ by their seeds, it has the mean as a line and one
    standard deviation to both sides as a band. `smooth` is the number of steps over which curves of
    training are averaged.

    Raises:
        InvalidError: no row has one of the metrics.
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(f"plots need matplotlib; {installing('plot')}") from None
    lines = -(-len(metrics) // _PER_LINE)
    columns = min(len(metrics), _PER_LINE)
    drawing = Figure(figsize=(_WIDTH * columns, _HEIGHT * lines), layout="constrained")
    FigureCanvasAgg(drawing)
    panels: Any = drawing.subplots(lines, columns, squeeze=False)
    for place, name in enumerate(metrics):
        _draw(panels[place // columns][place % columns], jobs, groups or {}, name, smooth)
    for place in range(len(metrics), lines * columns):
        panels[place // columns][place % columns].axis("off")
    return drawing


def save(drawing: Figure, path: Path) -> None:
    """Write a figure; its format is that of the name.

    Raises:
        InvalidError: the format is not known, or the file cannot be written.
    """
    if path.suffix.lower() not in _FORMATS:
        raise InvalidError(f"{path}: write {', '.join(_FORMATS)}")
    try:
        # A file that is the same for the same curves can be compared and cached.
        fixed = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        drawing.savefig(path, dpi=120, metadata=fixed.get(path.suffix.lower()))
    except OSError as error:
        raise InvalidError(f"{path}: {error.strerror}") from None


def _draw(
    axes: Any,
    jobs: Mapping[str, Sequence[MetricRow]],
    groups: Mapping[str, Sequence[Sequence[MetricRow]]],
    name: str,
    smooth: int,
) -> None:
    is_alone = len(jobs) + len(groups) == 1
    for label, rows in jobs.items():
        for curve in metric_curves(rows, name):
            legend = curve.label if is_alone else f"{label}: {curve.label}"
            style = "o-" if curve.held_out else "-"
            values = curve.values if curve.held_out else _smoothed(curve.values, smooth)
            axes.plot(curve.steps, values, style, markersize=3, linewidth=1, label=_plain(legend))
    for label, runs in groups.items():
        for band in group_curves(runs, name):
            _draw_band(axes, band, f"{label}: {band.label}, {len(runs)} runs", smooth)
    axes.set_xlabel("step")
    axes.set_title(_plain(name))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _draw_band(axes: Any, band: GroupCurve, legend: str, smooth: int) -> None:
    width = 1 if band.held_out else smooth
    means, spreads = _smoothed(band.means, width), _smoothed(band.spreads, width)
    style = "o-" if band.held_out else "-"
    (line,) = axes.plot(band.steps, means, style, markersize=3, linewidth=1, label=_plain(legend))
    low = [middle - spread for middle, spread in zip(means, spreads, strict=True)]
    high = [middle + spread for middle, spread in zip(means, spreads, strict=True)]
    axes.fill_between(band.steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _plain(text: str) -> str:
    """A label as it is: dollar signs would begin a formula."""
    return visible(text).replace("$", r"\$")


def _smoothed(values: Sequence[float], width: int) -> list[float]:
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _curve(rows: Sequence[MetricRow], name: str, label: str, held_out: bool = False) -> MetricCurve:
    points = {row.step: float(row.values[name]) for row in rows if _is_number(row.values.get(name))}
    steps = tuple(sorted(points))
    return MetricCurve(label, steps, tuple(points[step] for step in steps), held_out)


def _by_evaluation(rows: Sequence[MetricRow]) -> dict[str, list[MetricRow]]:
    by_evaluation: dict[str, list[MetricRow]] = {}
    for row in rows:
        if row.kind is Purpose.EVAL and row.values.get("complete") is not False:
            by_evaluation.setdefault(str(row.values.get("set", "")), []).append(row)
    return dict(sorted(by_evaluation.items()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
