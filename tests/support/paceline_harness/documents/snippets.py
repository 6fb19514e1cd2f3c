"""Fenced blocks of Markdown pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>\w*)\n(?P<body>.*?)^ *(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\Z")
_FILE = re.compile(r"^`([\w./-]+\.\w+)`:\Z", re.MULTILINE)
_SESSION = "<!-- session -->"


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block.

    Attributes:
        line: Number of its first line in the page.
        not_run: Why it is only parsed, from `<!-- not run: REASON -->` in the line before it.
        file: Name of the file that it is, from a line that ends in the file's name and a colon.
    """

    page: Path
    line: int
    language: str
    body: str
    not_run: str = ""
    file: str = ""


def snippets(page: Path) -> Iterator[Snippet]:
    """All fenced blocks of a page, in order."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        before = text[: match.start()].rstrip()
        reason = _NOT_RUN.search(before)
        name = _FILE.search(before[: reason.start()].rstrip() if reason else before)
        yield Snippet(
            page,
            text.count("\n", 0, match.start()) + 2,
            match["language"],
            textwrap.dedent(match["body"]),
            reason[1] if reason else "",
            name[1] if name else "",
        )


def is_session(page: Path) -> bool:
    """Whether the commands of a page are run, one after the other, with the files that it shows."""
    return _SESSION in page.read_text()
