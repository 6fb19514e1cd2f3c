"""Logs and plug-ins: tests too small for their own files."""

import logging

import pytest

from paceline.errors import InvalidError
from paceline.plugins.allowed import AllowedTargets
from paceline.plugins.registry import check, find
from paceline.telemetry.logs import EventFormatter


def test_an_event_is_one_line_with_quoted_values() -> None:
    record = logging.LogRecord("reward", logging.INFO, "", 0, "scored", None, None)
    record.event = {"job": "a", "text": "two words", "took_s": 0.123456789}
    line = EventFormatter().format(record)
    assert line.endswith("INFO reward scored job=a text='two words' took_s=0.123457")


def test_plugins_are_found_by_name_and_by_attribute_if_listed() -> None:
    listed = AllowedTargets.of(["json:dumps", "json:nope"])
    assert find("rewards", "json:dumps", allowed=listed).__name__ == "dumps"
    with pytest.raises(InvalidError, match=r"'nope' is not installed; installed: .+exact"):
        check("rewards", "nope")
    with pytest.raises(InvalidError, match="cannot import 'json:nope'"):
        find("rewards", "json:nope", allowed=listed)
