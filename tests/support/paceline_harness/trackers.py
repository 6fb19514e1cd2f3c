"""Trackers that fail, leak secrets or write lines, named by tests in job files."""

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
    """A tracker that writes points to `points.jsonl`; the file `trouble` selects a failure.

    hang: blocks forever. crash: the process dies. refuse: raises. half: dies after the first point
    of a call. lose: dies after writing all points, before returning. noise: prints, but works.
    """
    return Lines(run, trouble=trouble, tells=tells)


class Lines:
    """See `lines`; without `tells` it does not report the rows it holds."""

    def __init__(self, run: TrackedRun, *, trouble: str, tells: bool) -> None:
        self._path = run.folder / "points.jsonl"
        self._trouble = Path(trouble) if trouble else None
        self._tells = tells
        self.url = str(self._path)
        self._ail()

    @property
    def rows(self) -> int | None:
        """Number of lines with an index; None without `tells`."""
        return len(self._held()) if self._tells else None

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Append a line per point."""
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
        """Release nothing."""

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
    """A tracker whose URL contains secrets."""
    tracker = Lines(run, trouble="", tells=True)
    tracker.url = "https://me:correct-horse@host/run?token=battery-staple"
    return tracker


def refusing(run: TrackedRun) -> Lines:
    """A tracker whose error message quotes its arguments."""
    raise ConnectionError(f"key {os.environ['SOME_API_KEY']}")
