"""Generates the table of values in the chart's README from their `# --` comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "paceline"
README = CHART / "README.md"
BEGIN, END = "<!-- values: written by deploy/helm/readme.py -->", "<!-- end of values -->"
KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]\w*):")
COMMENT = re.compile(r"^ *# (?P<first>-- )?(?P<text>.*)$")


def files() -> dict[Path, str]:
    """Path and content of the file."""
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return {README: f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"}


def table() -> str:
    """A row for each value that has a `# --` comment."""
    source = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(source)
    told = list(documented(source))
    sections = {path[:-1] for path, _ in told}
    rows = [
        f"| `{'.'.join(path)}` | {'' if path in sections else _shown(values, path)} | {comment} |"
        for path, comment in told
    ]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])


def documented(source: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and comment of each key, in order."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in source.splitlines():
        if found := KEY.match(line):
            indent = len(found["indent"])
            path = [item for item in path if item[0] < indent] + [(indent, found["key"])]
            if comment:
                yield tuple(key for _, key in path), " ".join(comment)
            comment = []
        elif (said := COMMENT.match(line)) and (said["first"] or comment):
            comment.append(said["text"])
        else:
            comment = []


def _shown(values: Any, path: tuple[str, ...]) -> str:
    for key in path:
        values = values[key]
    return f"`{json.dumps(values)}`"
