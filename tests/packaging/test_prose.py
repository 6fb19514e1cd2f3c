"""Markdown is wrapped where that changes nothing on the page."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
WORDS = "a sentence of several words " * 8
CODE = "`" + "long code " * 11 + "end`"


@pytest.fixture(scope="module")
def wrapped() -> Callable[[str], str]:
    return runpy.run_path(str(ROOT / "dev" / "prose.py"))["wrapped"]


@pytest.mark.parametrize(
    "text",
    [
        WORDS,
        f"* {WORDS}\n  1. {WORDS}\n\n    {WORDS}\n* b\n",
        f"{WORDS}\n# Heading of {WORDS}\n",
        f"{WORDS}[a link with {WORDS}](page.md#part) {WORDS}",
        f"{WORDS} {CODE}, {CODE} and {CODE}",
        "word - " * 40,
        "as in 1. of it " * 30,
        f"<!-- {WORDS} -->\n\n{WORDS}",
    ],
)
def test_lines_are_short_and_the_page_stays_the_same(
    wrapped: Callable[[str], str], text: str
) -> None:
    shorter = wrapped(text)
    prose = [line for line in shorter.splitlines() if not line.startswith(("#", "<!--"))]
    assert all(len(line) <= 120 or "`" in line for line in prose)
    assert " ".join(shorter.split()) == " ".join(text.split())
    render = MarkdownIt("commonmark").render
    assert render(shorter).split() == render(text).split()
    assert wrapped(shorter) == shorter


@pytest.mark.parametrize(
    "text",
    [
        f"| {WORDS} | {WORDS} |\n|---|---|\n",
        f"```\n{WORDS}\n\n{WORDS}\n```\n",
        f"    ```yaml\n    {WORDS}\n    ```\n",
        f"[name]: {'https://example.org/' * 8}\n",
        f"short lines\nof a paragraph\n\n| {WORDS} |\n",
        f"[text]({'folder/' * 20}page.md)\n",
    ],
)
def test_what_cannot_be_wrapped_stays(wrapped: Callable[[str], str], text: str) -> None:
    assert wrapped(text) == text


def test_the_check_names_the_line(tmp_path: Path) -> None:
    names = runpy.run_path(str(ROOT / "dev" / "prose.py"))
    page = tmp_path / "page.md"
    page.write_text(f"short\n\n{WORDS}\n")
    assert [*names["_too_long"](page)] == [3]
    page.write_text(names["wrapped"](page.read_text()))
    assert [*names["_too_long"](page)] == []
