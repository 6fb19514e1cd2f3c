"""Reports lines of Markdown that are longer than 120 characters; `--write` wraps their paragraphs.

Tables, fenced code, comments, headings and definitions of links stay as they are, and so does a
line whose only long part cannot be divided: a link or a span of code.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINE = 120
# The text of a longer link may be divided between its words.
MAX_LINK = 60
_ENTRY = re.compile(r"( *)((?:[*+-]|\d+[.)]) +)?")
_FENCE = re.compile(r" *(`{3,}|~{3,})")
# Lines that mean something by the way they begin.
_AS_IT_IS = re.compile(r" *(?:$|#{1,6} |\||>|<!--|</?\w|\[[^\]]+\]: |!\[|---)")
# A word that would turn the line which it begins into something else.
_BEGINS_A_BLOCK = re.compile(r"(?:[*+-]|\d+[.)]|#{1,6}|=+|-+|[>|<].*|[`~]{3}.*)$")
_WHOLE = re.compile(r"(?P<ticks>`+)(?:(?!(?P=ticks)).)+(?P=ticks)|!?\[(?P<text>[^\]]*)\]\([^)]*\)")
_SPACE = "\0"


def main(arguments: list[str]) -> int:
    """Print lines that are too long, or with `--write` wrap them; returns 1 if there are any."""
    too_long = [f"{page.relative_to(ROOT)}:{line}" for page in pages() for line in _too_long(page)]
    if arguments == ["--write"]:
        for page in pages():
            page.write_text(wrapped(page.read_text()))
        return 0
    for place in too_long:
        print(f"{place}: longer than {MAX_LINE} characters; python dev/prose.py --write wraps it")
    return 1 if too_long else 0


def pages() -> list[Path]:
    """All Markdown files of the repository, also those that are not yet tracked."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in sorted(set(listed.stdout.split())) if (ROOT / name).exists()]


def wrapped(text: str) -> str:
    """The text with every paragraph wrapped that has a line of more than 120 characters."""
    return "".join(
        "".join(_filled(block)) if prose and _long(block) else "".join(block)
        for prose, block in _blocks(text.splitlines(keepends=True))
    )


def _too_long(page: Path) -> Iterator[int]:
    before = page.read_text()
    changed = wrapped(before).splitlines()
    lines = before.splitlines()
    if lines != changed:
        kept = set(changed)
        yield from (
            number
            for number, line in enumerate(lines, 1)
            if len(line) > MAX_LINE and line not in kept
        )


def _long(block: list[str]) -> bool:
    return any(len(line.rstrip("\n")) > MAX_LINE for line in block)


def _blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Paragraphs and entries of lists as (True, lines), everything else as (False, lines)."""
    block: list[str] = []
    fence = comment = ""
    for line in lines:
        opens = _FENCE.match(line)
        verbatim = bool(fence or comment or opens or _AS_IT_IS.match(line))
        if fence:
            fence = "" if opens and line.strip() == fence else fence
        elif opens:
            fence = opens[1]
        elif comment or line.lstrip().startswith("<!--"):
            comment = "" if "-->" in line else "-->"
        entry = _ENTRY.match(line)
        if block and (verbatim or (entry and entry[2])):
            yield True, block
            block = []
        if verbatim:
            yield False, [line]
        else:
            block.append(line)
    if block:
        yield True, block


def _filled(block: list[str]) -> Iterator[str]:
    """The lines of a paragraph; those after the first are indented as the text of the first is."""
    entry = _ENTRY.match(block[0])
    first = entry[0] if entry else ""
    indent = " " * len(first)
    words = _words(" ".join(line.strip() for line in block)[len(first.lstrip()) :])
    line = first + words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) > MAX_LINE:
            yield line + "\n"
            line = indent + word
        else:
            line += " " + word
    yield line + "\n"


def _words(text: str) -> list[str]:
    """Parts that are never divided: words, code, short links, a sign with the word before it."""
    whole = _WHOLE.sub(_undivided, text)
    words: list[str] = []
    for word in whole.split():
        if words and _BEGINS_A_BLOCK.match(word):
            words[-1] += " " + word
        else:
            words.append(word)
    return [word.replace(_SPACE, " ") for word in words]


def _undivided(match: re.Match[str]) -> str:
    label = match["text"] or ""
    if len(label) > MAX_LINK and "`" not in label:
        return match[0]
    return match[0].replace(" ", _SPACE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
