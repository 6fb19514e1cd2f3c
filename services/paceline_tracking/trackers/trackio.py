"""trackio: a project in the folder that all jobs share, or on `TRACKIO_SERVER_URL`/`_SPACE_ID`.

The address and its token (`TRACKIO_WRITE_TOKEN`, `HF_TOKEN`) come from the environment, and so may
the folder (`TRACKIO_DIR`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun
from paceline_tracking.trackers.tables import COLUMNS, place, table

ROW = "paceline/row"
_LOOK_S = 0.05


def trackio(run: TrackedRun, *, project: str = "paceline", group: str | None = None) -> Trackio:
    """A tracker whose run has the job's id as its name."""
    run.shared_folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRACKIO_DIR", str(run.shared_folder))
    import trackio as library

    opened = library.init(
        project=project,
        name=run.run_id,
        group=group,
        resume="allow",
        config=dict(run.config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return Trackio(run, opened, project)


class Trackio:
    """trackio writes from a thread of its own and raises nothing, so that what is there is read."""

    def __init__(self, run: TrackedRun, opened: Any, project: str) -> None:
        self._run = run
        self._opened = opened
        self._project = project
        self._local = not any(map(os.environ.get, ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")))
        self._entries = self._count() if self._local else 0
        self.rows = self._held() if self._local else None
        self.url = os.environ["TRACKIO_DIR"] if self._local else str(opened.url)

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """One entry each; returns when all of them can be read."""
        from trackio import Table

        for point in points:
            told: dict[str, Any] = dict(point.values)
            told |= {"version": max(point.version, 0), "trainer_step": point.step}
            if point.samples:
                rows = table(point.step, point.samples)
                told["samples"] = Table(columns=list(COLUMNS), data=rows)
            if point.index >= 0:
                told[ROW] = point.index
            self._opened.log(told, step=place(self._run, point))
        self._entries += len(points)
        # For ever if they do not come, which the time limit of the call ends.
        while self._local and self._count() < self._entries:
            time.sleep(_LOOK_S)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """What of the summary is a number, then everything is written."""
        told = {f"job/{name}": value for name, value in summary.items() if _is_number(value)}
        self._opened.log({**told, "job/succeeded": int(state == "succeeded")})
        self._opened.finish()

    def close(self) -> None:
        """Everything is written."""
        self._opened.finish()

    def _count(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        run = self._run.run_id
        return SQLiteStorage.get_log_count(self._project, run, run_id=self._opened.id)

    def _held(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        told = SQLiteStorage.get_metric_values(
            self._project, self._run.run_id, ROW, run_id=self._opened.id
        )
        return max((int(entry["value"]) + 1 for entry in told), default=0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
