"""Logs and plug-ins: tests too small for their own files."""

import logging
import sys

import pytest

from paceline.errors import InvalidError, NotFoundError, PacelineError, plugin_boundary
from paceline.platform.telemetry.logs import EventFormatter
from paceline.plugins.allowed import AllowedTargets
from paceline.plugins.registry import check, find


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


def fails(error: BaseException) -> None:
    raise error


ERRORS = [ZeroDivisionError("by zero"), SystemExit(3), PacelineError("no")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_plug_in_raises_becomes_one_error(error: BaseException) -> None:
    reported: list[BaseException | None] = []
    with (
        pytest.raises(InvalidError) as refused,
        plugin_boundary("reward.0: mine", report=lambda: reported.append(sys.exception())),
    ):
        fails(error)
    assert refused.value.full_message == f"reward.0: mine: {type(error).__name__}: {error}"
    assert reported == [refused.value.__cause__] == [error]


def test_a_boundary_lets_some_errors_pass() -> None:
    with pytest.raises(NotFoundError), plugin_boundary("mine", passes=(PacelineError,)):
        fails(NotFoundError("gone"))
    with pytest.raises(KeyboardInterrupt), plugin_boundary("mine"):
        fails(KeyboardInterrupt())
