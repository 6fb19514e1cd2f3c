"""Dashboards: their queries use existing series, and Grafana can show them."""

from typing import Any

import promql_parser
import pytest

from paceline.platform.telemetry.metric_names import NAMES, VALUES
from paceline_harness.monitoring.dashboards import (
    Asked,
    Selector,
    alert_queries,
    board_queries,
    boards,
    labels_named,
    panels,
    recorded,
    rules,
    selectors,
)

BOARDS = boards()
ASKED = [
    *board_queries(),
    *alert_queries(),
    *(
        Asked(f"{name} ({n})", expr)
        for name, found in recorded().items()
        for n, expr in enumerate(found)
    ),
]
# What a scrape adds to every series, in the chart, the composition and a run directory alike.
OF_TARGETS = {"app", "service", "job", "instance"}
# Not ours: of the client library, of Prometheus itself.
OTHERS = {
    "process_cpu_seconds_total": set[str](),
    "process_resident_memory_bytes": set[str](),
    "process_open_fds": set[str](),
    "process_max_fds": set[str](),
    "up": set[str](),
    "ALERTS": {"alertname", "alertstate", "severity"},
}


def ours() -> dict[str, set[str]]:
    """Series that the services export: name to labels."""
    found: dict[str, set[str]] = {}
    for spec in NAMES.values():
        if spec.kind == "histogram":
            found |= {f"{spec.name}_{part}": set(spec.labels) for part in ("sum", "count")}
            found[f"{spec.name}_bucket"] = {*spec.labels, "le"}
        else:
            found[spec.name] = set(spec.labels)
    return found


OURS = ours()


def labels_of(metric: str) -> set[str]:
    """Labels that a series may have; a recorded one has those of its rule."""
    if metric in recorded():
        return recorded_labels(metric)
    known = OURS | OTHERS
    assert metric in known, f"no metric {metric}"
    return known[metric] | OF_TARGETS


def recorded_labels(metric: str) -> set[str]:
    """Labels that the rules of this name aggregate by, inherit, or set."""
    found = {
        label
        for rule in rules()
        if rule.get("record") == metric
        for label in rule.get("labels", ())
    }
    for expr in recorded()[metric]:
        found |= labels_named(expr)
        for one in selectors(expr):
            found |= OF_TARGETS if one.metric == metric else labels_of(one.metric)
    return found


def test_dashboards_cover_what_users_look_for() -> None:
    assert {
        *("overview", "utilisation", "rollout", "environment", "reward", "trainer", "weights"),
        *("ledger", "cost"),
    } <= set(BOARDS)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.place)
def test_queries_parse_and_name_metrics_and_labels_that_exist(asked: Asked) -> None:
    promql_parser.parse(asked.expr)
    read = selectors(asked.expr)
    assert read, asked.expr
    for selector in read:
        assert selector.labels <= labels_of(selector.metric), selector
        for label, value in selector.equal:
            allowed = VALUES.get(label)
            if isinstance(allowed, tuple) and selector.metric in OURS:
                assert value in allowed, f"{label}={value}"
    known = set[str]().union(*(labels_of(selector.metric) for selector in read))
    assert labels_named(asked.expr) <= known


def test_a_renamed_metric_and_a_wrong_type_are_noticed() -> None:
    with pytest.raises(AssertionError, match="no metric"):
        labels_of("paceline_busy_secs_total")
    with pytest.raises(ValueError, match="matrix"):
        promql_parser.parse("rate(paceline_step)")
    assert selectors('rate(a_total{x="1", y=~"2"}[5m]) > 0 unless b offset 1m') == [
        Selector("a_total", frozenset({"x", "y"}), (("x", "1"),)),
        Selector("b", frozenset(), ()),
    ]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(name: str) -> None:
    shown = panels(BOARDS[name])
    ids = [panel["id"] for panel in shown]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in shown:
        spot = panel["gridPos"]
        assert spot["x"] + spot["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(spot["x"], spot["x"] + spot["w"])
            for y in range(spot["y"], spot["y"] + spot["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_titles_and_descriptions(name: str) -> None:
    shown = [panel for panel in panels(BOARDS[name]) if panel["type"] != "row"]
    titles = [panel["title"] for panel in shown]
    assert len(set(titles)) == len(titles)
    for panel in shown:
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["description"].endswith("."), panel["title"]
        assert defaults["unit"], panel["title"]
        assert defaults["thresholds"]["steps"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


@pytest.mark.parametrize("name", BOARDS)
def test_the_data_source_is_whichever_one_chooses(name: str) -> None:
    board = BOARDS[name]
    (source,) = [v for v in board["templating"]["list"] if v["type"] == "datasource"]
    assert source["query"] == "prometheus"
    chosen = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    for place in found_sources(board):
        assert place == chosen


def found_sources(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [found for item in value for found in found_sources(item)]
    if not isinstance(value, dict):
        return []
    own = [value["datasource"]] if "datasource" in value else []
    return own + [found for item in value.values() for found in found_sources(item)]


def test_dashboards_have_addresses_of_their_own_and_lead_to_each_other() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)
    for name, board in BOARDS.items():
        assert board["uid"] == f"paceline-{name}"
        assert board["tags"] == ["paceline"]
        (link,) = board["links"]
        assert (link["type"], link["tags"]) == ("dashboards", ["paceline"])


@pytest.mark.parametrize("name", BOARDS)
def test_variables_are_used_and_known(name: str) -> None:
    board = BOARDS[name]
    text = "".join(t["expr"] for panel in panels(board) for t in panel.get("targets", ()))
    known = {v["name"] for v in board["templating"]["list"] if v["type"] == "query"}
    for variable in known:
        assert f"${variable}" in text, variable
    for asked in board_queries():
        assert "$" not in asked.expr, asked


def test_rules_are_named_once() -> None:
    names = [rule["alert"] for rule in rules() if "alert" in rule]
    assert len(set(names)) == len(names)
