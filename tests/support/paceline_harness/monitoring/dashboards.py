"""The PromQL expressions in dashboards and alert rules, with Grafana's variables filled in.

Needs the `dev` extra.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import promql_parser as promql
import yaml

from paceline.platform.telemetry.monitoring import DASHBOARDS, RULES

LABEL_VALUES = re.compile(r"label_values\((\w+), *(\w+)\)")
SHOWN = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class Asked:
    """An expression, its location, and the labels by which its result is shown."""

    place: str
    expr: str
    shown: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric with its label matchers, as `{label: value}` for equalities."""

    metric: str
    labels: frozenset[str]
    equal: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The selector as PromQL, with equality matchers only."""
        return f"{self.metric}{{{', '.join(f'{k}={json.dumps(v)}' for k, v in self.equal)}}}"


def boards() -> dict[str, dict[str, Any]]:
    """The dashboards by file name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels, including row headings."""
    return [one for panel in board["panels"] for one in (panel, *panel.get("panels", ()))]


def board_queries(*, window: str = "1m", time_range: str = "1h") -> Iterator[Asked]:
    """Every panel target and variable query, with Grafana's own variables filled in."""
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel.get("targets", ()):
                expr = filled(target["expr"], board, window=window, time_range=time_range)
                shown = frozenset(SHOWN.findall(target["legendFormat"]))
                yield Asked(f"{name}: {panel['title']} ({target['refId']})", expr, shown)
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield Asked(f"{name}: ${variable['name']}", values_of(variable["query"]["query"]))


def filled(expr: str, board: dict[str, Any], *, window: str, time_range: str) -> str:
    """The expression as Grafana sends it with all values of every variable selected."""
    expr = expr.replace("$__rate_interval", window).replace("$__range", time_range)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            expr = re.sub(rf"\${variable['name']}\b", variable["allValue"], expr)
    return expr


def values_of(query: str) -> str:
    """The series from which `label_values(metric, label)` takes its values."""
    found = LABEL_VALUES.fullmatch(query)
    assert found is not None, query
    return f'{found[1]}{{{found[2]}!=""}}'


@cache
def rules() -> list[dict[str, Any]]:
    """All rules of all files: alerts and recording rules."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yaml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alert_queries() -> Iterator[Asked]:
    """The expression of every alert."""
    for rule in rules():
        if "alert" in rule:
            yield Asked(rule["alert"], rule["expr"])


@cache
def recorded() -> dict[str, list[str]]:
    """Recording rules: expressions by name; several may record the same name."""
    found: dict[str, list[str]] = {}
    for rule in rules():
        if "record" in rule:
            found.setdefault(rule["record"], []).append(rule["expr"])
    return found


def selectors(expr: str) -> list[Selector]:
    """Every metric that an expression reads."""
    found: list[Selector] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql.VectorSelector):
            found.extend(_selectors(node))

    promql.walk(promql.parse(expr), visit)
    return list(dict.fromkeys(found))


def labels_named(expr: str) -> set[str]:
    """Labels of `by`, `on` and `group_left`, in addition to those that selectors match."""
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)
        if isinstance(node, promql.BinaryExpr) and node.modifier is not None:
            if node.modifier.matching is not None:
                found.update(node.modifier.matching.labels)
            found.update(node.modifier.group_labels or ())

    promql.walk(promql.parse(expr), visit)
    return found


def _selectors(node: promql.VectorSelector) -> list[Selector]:
    """One selector per metric name: `{__name__=~"a|b"}` has two."""
    matchers = [m for m in node.matchers.matchers if m.name != "__name__"]
    named = [m.value for m in node.matchers.matchers if m.name == "__name__"]
    names = [node.name] if node.name else [name for value in named for name in value.split("|")]
    equal = tuple((m.name, m.value) for m in matchers if m.op == promql.MatchOp.Equal)
    return [Selector(name, frozenset(m.name for m in matchers), equal) for name in names]
