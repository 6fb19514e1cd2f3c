"""The JSON messages, one per line, between a feed and its tracker process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun, TrackedSample


def run_to(run: TrackedRun) -> dict[str, Any]:
    """A run as JSON."""
    return {**asdict(run), "folder": str(run.folder), "shared_folder": str(run.shared_folder)}


def run_from(raw: Mapping[str, Any]) -> TrackedRun:
    """A run from JSON."""
    folders: dict[str, Any] = {name: Path(raw[name]) for name in ("folder", "shared_folder")}
    return TrackedRun(**{**raw, **folders})


def point_to(point: TrackedPoint) -> dict[str, Any]:
    """A point as JSON."""
    return asdict(point)


def point_from(raw: Mapping[str, Any]) -> TrackedPoint:
    """A point from JSON."""
    samples: Any = tuple(TrackedSample(**sample) for sample in raw["samples"])
    return TrackedPoint(**{**raw, "samples": samples})
