"""Texts of others can neither act on a terminal nor pass for a line of a log of ours."""

from __future__ import annotations

import ast
import io
import logging
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import paceline.front.cli
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.printing import say
from paceline.platform.telemetry.logs import EventFormatter

# C0, DEL, C1, separators of lines, marks of direction and of order.
ACTS = [
    *map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)),
    *map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF)),
]
FORGED = "2026-11-21T05:00:00.000Z ERROR chassis all is lost"
HOSTILE = st.lists(
    st.sampled_from([*ACTS, "a", " ", "=", "'", "\x1b[2J", "\x1b]0;x\x07", f"\n{FORGED}\n"])
    | st.characters(exclude_categories=["Cs"]),
    max_size=30,
).map("".join)
ALLOWED = {"\n", "\t"}


def acting(text: str) -> set[str]:
    """Characters of a text that act on a terminal, but ends of lines and tabs."""
    return set(text) & (set(ACTS) - ALLOWED)


def formatted(message: str, error: str | None = None, **event: object) -> str:
    info = None
    if error is not None:
        try:
            raise ValueError(error)
        except ValueError as caught:
            info = (ValueError, caught, caught.__traceback__)
    record = logging.LogRecord("x", logging.INFO, "", 0, message, None, info)
    record.event = event
    return EventFormatter().format(record)


@given(HOSTILE, HOSTILE)
@example("\x1b[31m", "\u202e")
@example(f"job\n{FORGED}", "")
def test_an_event_is_one_line_that_does_nothing(message: str, value: str) -> None:
    line = formatted(message.replace("%", ""), job=value, note=value)
    assert not acting(line), repr(line)
    assert "\n" not in line


@given(HOSTILE)
@example("\x1b[31m")
@example(f"x\n{FORGED}")
def test_a_traceback_forges_no_event(error: str) -> None:
    lines = formatted("failed", error).split("\n")
    assert not acting("\n".join(lines)), lines
    assert [each for each in lines if re.match(r"\d{4}-\d\d-\d\dT", each)] == lines[:1]


def test_values_are_read_back() -> None:
    line = formatted("m", name="a\x1b[2Jb", reason="two words\n")
    values = re.findall(r"=('(?:[^'\\]|\\.)*')", line)
    assert [*map(ast.literal_eval, values)] == ["a\x1b[2Jb", "two words\n"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HOSTILE)
@example("\x1b]0;x\x07")
def test_what_is_said_does_nothing(capsys: pytest.CaptureFixture[str], text: str) -> None:
    say(text)
    say(text, error=True)
    shown = capsys.readouterr()
    assert not acting(shown.out + shown.err)


@given(HOSTILE)
@example("\x1b]0;x\x07")
def test_what_a_console_shows_does_nothing(text: str) -> None:
    table = Table("name", title=text)
    table.add_row(text)
    for terminal in (False, True):
        out = io.StringIO()
        console = SafeConsole(file=out, force_terminal=terminal, width=60, color_system=None)
        console.print(table, Panel(Text(text)), text, markup=False)
        console.print(text, soft_wrap=True, markup=False)
        assert not acting(out.getvalue()), repr(out.getvalue())


def test_live_views_show_texts_of_others_safely() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=60, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        live.update(Text("job \x1b]0;stolen\x07 \u202e"), refresh=True)
    assert "stolen" in out.getvalue()
    assert "\x1b]0" not in out.getvalue()
    assert not {"\x07", "\u202e"} & set(out.getvalue())


def test_commands_print_in_no_other_way() -> None:
    folder = Path(paceline.front.cli.__file__).parent
    own = {folder / "terminal" / name for name in ("printing.py", "console.py")}
    for path in sorted({*folder.rglob("*.py")} - own):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", "")
            assert name not in {"print", "Console"}, f"{path.name}:{getattr(node, 'lineno', 0)}"
