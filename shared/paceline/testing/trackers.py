"""Contract tests for experiment trackers, built-in and third-party.

def test_mine(tmp_path):
    fulfils_the_contract("mine", tmp_path, read=lambda run: [...rows that the run holds...])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun, TrackedSample, Tracker, registry

ROWS = 6
REWOUND = 5  # number of rows just after the step has rewound
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
    """Rows of a history that rewinds at row 4 (steps 1, 2, 3, 4, 3, 4, ...), and a system point."""
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
    """Check that a run restarted twice, once after a rewind, resumes and has every row once."""
    factory = registry.find("trackers", kind)
    run = tracked_run(folder)
    first: Tracker = factory(run, **(options or {}))
    assert first.rows in {0, None}, "a new run must be empty"
    first.write(tracked_rows(0, 3))
    first.close()
    second: Tracker = factory(run, **(options or {}))
    assert second.rows in {3, None}, "a resumed run must report the rows it holds"
    second.write(tracked_rows(3, REWOUND))
    second.close()
    third: Tracker = factory(run, **(options or {}))
    assert third.rows in {REWOUND, None}, (
        "the last row is the one with the greatest index, not step"
    )
    third.write(tracked_rows(REWOUND, ROWS))
    third.finish("succeeded", {"state": "succeeded", "steps": ROWS, "eval_reward_end": None})
    assert isinstance(third.url, str)
    assert list(read(run)) == list(range(ROWS)), "every row must appear once, in order"
    third.close()
    return run
