"""A tracker that writes a run to a CSV file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun


class CsvTracker:
    """One line per value: row, step, version, name, value. Resumes by reading its file."""

    def __init__(self, run: TrackedRun, *, separator: str = ",") -> None:
        self._path, self._separator = run.folder / "values.csv", separator
        self._path.touch()
        self.url = str(self._path)

    @property
    def rows(self) -> int:
        """Number of history rows recorded; `system` points have no row."""
        lines = self._path.read_text().splitlines()
        return max((int(line.split(self._separator)[0]) + 1 for line in lines), default=0)

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Append points; they are written when this returns."""
        with self._path.open("a") as file:
            for point in points:
                columns = (point.index, point.step, point.version)
                for name, value in point.values.items():
                    file.write(self._separator.join(map(str, (*columns, name, value))) + "\n")

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """Write the summary of the finished job."""
        content = json.dumps({"state": state, **summary})
        self._path.with_name("summary.json").write_text(content)

    def close(self) -> None:
        """Nothing to release."""
