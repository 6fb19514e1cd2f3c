"""The contract of experiment trackers, for built-in ones and those of others; and one that fails.

def test_mine(tmp_path):
    fulfils_the_contract("mine", tmp_path, read=lambda run: [...rows that the run holds...])
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline import plugins
from paceline.interfaces import TrackedPoint, TrackedRun, TrackedSample, Tracker

ROWS = 6
REWOUND = 5  # rows when the step has just gone back
Rows = Callable[[TrackedRun], Sequence[int]]


def tracked_run(folder: Path, **changes: Any) -> TrackedRun:
    """A run with folders below `folder`."""
    fields: dict[str, Any] = {
        "run_id": "contract-1",
        "name": "contract",
        "tenant": "default",
        "axis": "step",
        "folder": folder / "run",
        "shared_folder": folder / "shared",
        "config": {"name": "contract", "stop": {"steps": ROWS}},
        **changes,
    }
    fields["folder"].mkdir(parents=True, exist_ok=True)
    return TrackedRun(**fields)


def tracked_rows(first: int, last: int, *, samples: bool = True) -> list[TrackedPoint]:
    """Rows of a history that rewinds at row 4: steps 1, 2, 3, 4, 3, 4, ...; then a system point."""
    steps = [*range(1, 5), *range(3, 100)]
    sample = TrackedSample("1+1=", "2 | `3`\n", 1.0, {"exact": 1.0}, 0, 1, False, "contract-1.0/0")
    rows = [
        TrackedPoint(
            kind="train",
            index=index,
            step=steps[index],
            version=index,
            values={"train/loss": 1.0 / (index + 1), "train/version": float(index)},
            samples=(sample,) if samples and index % 3 == 0 else (),
        )
        for index in range(first, last)
    ]
    system = TrackedPoint("system", -1, steps[last - 1], last - 1, {"system/tokens_per_s": 5.0})
    return [*rows, system]


def fulfils_the_contract(
    kind: str, folder: Path, *, read: Rows, options: Mapping[str, Any] | None = None
) -> TrackedRun:
    """Three lives of a run, the third after a rewind: it resumes, and has every row once."""
    factory = plugins.find("trackers", kind)
    run = tracked_run(folder)
    first: Tracker = factory(run, **(options or {}))
    assert first.rows in {0, None}, "a new run holds nothing"
    first.write(tracked_rows(0, 3))
    first.close()
    second: Tracker = factory(run, **(options or {}))
    assert second.rows in {3, None}, "it resumes with what it holds"
    second.write(tracked_rows(3, REWOUND))
    second.close()
    third: Tracker = factory(run, **(options or {}))
    assert third.rows in {REWOUND, None}, "the last row is that of the greatest index, not step"
    third.write(tracked_rows(REWOUND, ROWS))
    third.finish("succeeded", {"state": "succeeded", "steps": ROWS, "eval_reward_end": None})
    assert isinstance(third.url, str)
    assert list(read(run)) == list(range(ROWS)), "every row once, in order"
    return run


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
