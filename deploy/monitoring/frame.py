"""Building blocks of all dashboards: data source, variables, links and panel types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table
from grafana_foundation_sdk.builders import timeseries as lines
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TAG = "paceline"
WIDTH = 24
# Dashboards do not fix a data source: users choose one of those configured in Grafana.
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

Steps = Sequence[tuple[float | None, str]]
"""Colour thresholds: each applies from its value upwards, the first (None) below all."""
Panels = Sequence[models.Panel | models.RowPanel]
PLAIN: Steps = ((None, "blue"),)
SHARE_BUSY: Steps = ((None, "blue"), (0.5, "green"), (0.9, "orange"))
BAD_IF_ANY: Steps = ((None, "green"), (1e-9, "red"))


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL with the legend of its series, e.g. `{{job}}`."""

    expr: str
    legend: str = ""
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a panel in the 24-column grid."""

    width: int = 12
    height: int = 8


class _Panel(Protocol):
    """Methods common to all panel builders of the SDK."""

    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def unit(self, unit: str) -> Self: ...
    def span(self, w: int) -> Self: ...
    def height(self, h: int) -> Self: ...
    def datasource(self, datasource: models.DataSourceRef) -> Self: ...
    def thresholds(self, thresholds: Builder[models.ThresholdsConfig]) -> Self: ...
    def with_target(self, target: Builder[Dataquery]) -> Self: ...
    def build(self) -> models.Panel: ...


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str = units.Short,
    size: Size = Size(),
    stacked: bool = False,
    steps: Steps = (),
    max_value: float | None = None,
) -> models.Panel:
    """Lines over time; thresholds are drawn as dashed lines."""
    panel = lines.Panel().min(0).fill_opacity(40 if stacked else 8).line_width(1)
    panel = panel.show_points(shapes.VisibilityMode.NEVER).span_nulls(False)
    panel = panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(shapes.LegendDisplayMode.LIST)
        .placement(shapes.LegendPlacement.BOTTOM)
    )
    panel = panel.tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    if steps:
        style = common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    if max_value is not None:
        panel = panel.max(max_value)
    return _dressed(panel, title, description, queries, unit=unit, size=size, steps=steps or PLAIN)


def number(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = units.Short,
    size: Size = Size(4, 4),
    steps: Steps = PLAIN,
    empty: str = "none",
) -> models.Panel:
    """The current value over a sparkline; `empty` if there is no series."""
    panel = stat.Panel().graph_mode(shapes.BigValueGraphMode.AREA).no_value(empty)
    panel = panel.color_mode(shapes.BigValueColorMode.VALUE).reduce_options(_last())
    return _dressed(panel, title, description, [query], unit=unit, size=size, steps=steps)


def name(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = units.PercentUnit,
    size: Size = Size(6, 4),
    steps: Steps = PLAIN,
    empty: str = "none",
) -> models.Panel:
    """Name and value of a series; for queries that select one."""
    panel = stat.Panel().graph_mode(shapes.BigValueGraphMode.NONE).no_value(empty)
    panel = panel.color_mode(shapes.BigValueColorMode.BACKGROUND).reduce_options(_last())
    panel = panel.text_mode(shapes.BigValueTextMode.VALUE_AND_NAME)
    return _dressed(
        panel, title, description, [query], unit=unit, size=size, steps=steps, instant=True
    )


def bars(
    title: str,
    description: str,
    *queries: Query,
    unit: str = units.Short,
    size: Size = Size(),
    steps: Steps = PLAIN,
    max_value: float | None = None,
) -> models.Panel:
    """Current values side by side."""
    panel = bargauge.Panel().orientation(shapes.VizOrientation.HORIZONTAL).min(0)
    panel = panel.display_mode(shapes.BarGaugeDisplayMode.BASIC).reduce_options(_last())
    if max_value is not None:
        panel = panel.max(max_value)
    shown = _dressed(
        panel, title, description, queries, unit=unit, size=size, steps=steps, instant=True
    )
    return shown


def grid(
    title: str,
    description: str,
    *queries: Query,
    unit: str = units.Short,
    size: Size = Size(),
    steps: Steps = PLAIN,
    columns: Sequence[str] = (),
) -> models.Panel:
    """A table with a row per label set; `columns` names the values of several queries."""
    shown = _dressed(
        table.Panel(), title, description, queries, unit=unit, size=size, steps=steps, instant=True
    )
    for target in shown.targets or []:
        target.format_val = PromQueryFormat.TABLE  # pyright: ignore[reportAttributeAccessIssue]
    names = (
        [f"Value #{chr(65 + i)}" for i in range(len(queries))] if len(queries) > 1 else ["Value"]
    )
    options = {
        "excludeByName": {"Time": True, "__name__": True},
        "renameByName": dict(zip(names, columns, strict=False)),
    }
    shown.transformations = [
        models.DataTransformerConfig(id_val="merge", options={}),
        models.DataTransformerConfig(id_val="organize", options=options),
    ]
    return shown


def heading(title: str) -> models.RowPanel:
    """Start a section."""
    return dashboard.Row(title).build()


def board(
    slug: str,
    title: str,
    description: str,
    panels: Panels,
    *,
    variables: Sequence[Builder[models.VariableModel]] = (),
) -> models.Dashboard:
    """A complete dashboard; panels are laid out left to right and numbered in order."""
    made = (
        dashboard.Dashboard(f"Paceline / {title}")
        .uid(f"paceline-{slug}")
        .description(description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_others())
        .annotation(_alerts())
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    for variable in variables:
        made = made.with_variable(variable)
    whole = made.build()
    whole.panels = place(panels)
    return whole


def place(panels: Panels) -> list[models.Panel | models.RowPanel]:
    """Assign ids and positions: a row has 24 columns, and a heading starts a new one."""
    x = y = tallest = 0
    for count, panel in enumerate(panels, 1):
        spot = panel.grid_pos or models.GridPos(h=1, w=WIDTH)
        if x + spot.w > WIDTH:
            x, y, tallest = 0, y + tallest, 0
        spot.x, spot.y = x, y
        panel.id_val, panel.grid_pos = count, spot
        x, tallest = x + spot.w, max(tallest, spot.h)
    return list(panels)


def variable(
    key: str, label: str, query: str, *, many: bool = True
) -> Builder[models.VariableModel]:
    """Variable with the values of a label; All is `.*`, so series without the label show too."""
    made = (
        dashboard.QueryVariable(key)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": f"variable-{key}"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(many)
    )
    if not many:
        return made
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return made.include_all(True).all_value(".*").current(everything)


def _dressed(
    panel: _Panel,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    size: Size,
    steps: Steps,
    instant: bool = False,
) -> models.Panel:
    panel = panel.title(title).description(description).unit(unit).datasource(SOURCE)
    panel = panel.span(size.width).height(size.height).thresholds(_thresholds(steps))
    for index, query in enumerate(queries):
        panel = panel.with_target(_target(query, chr(65 + index), instant=instant))
    return panel.build()


def _target(query: Query, ref: str, *, instant: bool) -> Builder[Dataquery]:
    made = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(SOURCE)
    made = made.legend_format(query.legend or "__auto")
    if query.hidden:
        made = made.hide(True)
    return made.instant() if instant else made.range()


def _thresholds(steps: Steps) -> Builder[models.ThresholdsConfig]:
    found = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _others() -> Any:
    return (
        dashboard.DashboardLink("Paceline")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _alerts() -> Any:
    return (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr('ALERTS{alertname=~"Paceline.*", alertstate="firing"}')
    )
