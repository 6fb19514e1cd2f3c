"""Trackers that fail, leak and write lines, as tests name them in job files."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun


def lines(run: TrackedRun, *, trouble: str = "", tells: bool = True) -> Lines:
    """A tracker that writes points into `points.jsonl`; `trouble` is a file that says what ails it.

    hang: waits for ever. crash: the process dies. refuse: raises. half: dies after the first point
    of a call. lose: writes all, and dies before it says so. noise: prints, and works.
    """
    return Lines(run, trouble=trouble, tells=tells)


class Lines:
    """See `lines`; with `tells` off it does not know what it holds."""

    def __init__(self, run: TrackedRun, *, trouble: str, tells: bool) -> None:
        self._path = run.folder / "points.jsonl"
        self._trouble = Path(trouble) if trouble else None
        self._tells = tells
        self.url = str(self._path)
        self._ail()

    @property
    def rows(self) -> int | None:
        """Lines with an index."""
        return len(self._held()) if self._tells else None

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Append a line for each."""
        ailment = self._ail()
        with self._path.open("a") as file:
            for point in points:
                file.write(json.dumps(asdict(point)) + "\n")
                file.flush()
                if ailment == "half":
                    os._exit(7)
        if ailment == "lose":
            os._exit(7)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """Write the summary."""
        self._ail()
        self._path.with_name("summary.json").write_text(json.dumps({"state": state, **summary}))

    def close(self) -> None:
        """Nothing is held."""

    def _held(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        found = map(json.loads, self._path.read_text().splitlines())
        return [point for point in found if point["index"] >= 0]

    def _ail(self) -> str:
        ailment = ""
        if self._trouble is not None and self._trouble.exists():
            ailment = self._trouble.read_text()
        while ailment == "hang":
            time.sleep(1.0)
        if ailment == "crash":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(9)
        if ailment == "refuse":
            raise ConnectionError(f"no server, key {os.environ.get('LINES_API_KEY', '')}")
        if ailment == "noise":
            print("{}\n" * 100_000)
        return ailment


def leaky(run: TrackedRun) -> Lines:
    """A tracker whose address holds everything that it should not."""
    tracker = Lines(run, trouble="", tells=True)
    tracker.url = "https://me:correct-horse@host/run?token=battery-staple"
    return tracker


def refusing(run: TrackedRun) -> Lines:
    """A tracker that tells what it was given."""
    raise ConnectionError(f"key {os.environ['SOME_API_KEY']}")
