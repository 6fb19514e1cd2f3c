"""Logs, metrics, plug-ins: what is too small for a file of its own."""

import logging

import pytest

from paceline.errors import InvalidError
from paceline.logs import EventFormatter
from paceline.metrics import NAMES, Metrics
from paceline.plugins import check, find


def test_an_event_is_one_line_with_quoted_values() -> None:
    record = logging.LogRecord("reward", logging.INFO, "", 0, "scored", None, None)
    record.event = {"job": "a", "text": "two words", "took_s": 0.123456789}
    line = EventFormatter().format(record)
    assert line.endswith("INFO reward scored job=a text='two words' took_s=0.123457")


def test_metrics_are_made_on_first_use_with_their_labels() -> None:
    metrics = Metrics()
    metrics.add("tokens", 3, job="a")
    metrics.set("step", 4, job="a")
    metrics.observe("staleness", [0, 1], job="a")
    assert metrics.registry.get_sample_value("paceline_generated_tokens_total", {"job": "a"}) == 3
    assert metrics.registry.get_sample_value("paceline_staleness_steps_count", {"job": "a"}) == 2
    with pytest.raises(TypeError, match="tokens is a Counter"):
        metrics.set("tokens", 1, job="a")


def test_metric_labels_are_bounded() -> None:
    allowed = {"job", "on", "reason", "method", "code", "kind", "state", "purpose", "status"}
    # `workload` is a kind of service, `pool` a name of the installation.
    allowed |= {"direction", "stage", "event", "workload", "pool"}
    for _, labels in NAMES.values():
        assert set(labels) <= allowed


def test_plugins_are_found_by_name_and_by_attribute() -> None:
    assert find("rewards", "json:dumps").__name__ == "dumps"
    with pytest.raises(InvalidError, match=r"'nope' is not installed; installed: .+exact"):
        check("rewards", "nope")
    with pytest.raises(InvalidError, match="cannot import 'json:nope'"):
        find("rewards", "json:nope")
