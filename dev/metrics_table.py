"""Generates the table of all metrics in docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

from paceline.platform.telemetry.metric_names import NAMES, Spec

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
BEGIN = "<!-- table: written by dev/metrics_table.py -->\n"
END = "<!-- end of table -->\n"


def files() -> dict[Path, str]:
    """Path and content of the file."""
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    return {DOCUMENT: head + BEGIN + table() + END + tail}


def table() -> str:
    """The table as Markdown."""
    rows = ["| metric | kind | labels | of | what |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*rows, *map(_row, NAMES.values())]) + "\n"


def _row(spec: Spec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{spec.name}` | {spec.kind} | {labels} | {', '.join(spec.services)} | {spec.text} |"
