"""The table in docs/metrics.md; `python -m paceline.monitoring.metrics_table FILE` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.metric_names import NAMES, Spec

BEGIN = "<!-- table: python -m paceline.monitoring.metrics_table docs/metrics.md -->\n"
END = "<!-- end of table -->\n"


def table() -> str:
    """All metrics as Markdown."""
    rows = ["| metric | kind | labels | of | what |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*rows, *map(_row, NAMES.values())]) + "\n"


def with_table(text: str) -> str:
    """A document with the table as it is to be."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table() + END + tail


def _row(spec: Spec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{spec.name}` | {spec.kind} | {labels} | {', '.join(spec.services)} | {spec.text} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
