"""Samples as rows of a table, the same for every tracker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun, TrackedSample

COLUMNS = (
    "step",
    "prompt",
    "response",
    "reward",
    "parts",
    "version",
    "staleness",
    "truncated",
    "episode",
)


def table(step: int, samples: Sequence[TrackedSample]) -> list[list[Any]]:
    """One row for each sample, by `COLUMNS`."""
    return [
        [
            step,
            sample.prompt,
            sample.response,
            sample.reward,
            json.dumps(dict(sample.parts)),
            sample.version,
            sample.staleness,
            sample.truncated,
            sample.episode,
        ]
        for sample in samples
    ]


def markdown(rows: Sequence[Sequence[Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    for sign in "\\`*_<>[]":
        text = text.replace(sign, "\\" + sign)
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")


def place(run: TrackedRun, point: TrackedPoint) -> int:
    """Where a point is on the x-axis that the job has chosen."""
    return max(point.version, 0) if run.axis == "version" else point.step
