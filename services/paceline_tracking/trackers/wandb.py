"""Weights & Biases: one run for a job, resumed by its id; offline with WANDB_MODE=offline.

Who and where (`WANDB_API_KEY`, `WANDB_BASE_URL`, `WANDB_MODE`) comes from the environment.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun
from paceline_tracking.trackers.tables import COLUMNS, table

ROW = "paceline/row"
# Log format of LevelDB, with a head of 7 bytes before it.
_HEAD_BYTES = 7
_BLOCK_BYTES = 32768
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def wandb(
    run: TrackedRun,
    *,
    project: str = "paceline",
    entity: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
) -> WeightsAndBiases:
    """A tracker whose run has the job's id."""
    import wandb as library

    opened = library.init(
        project=project,
        entity=entity,
        group=group,
        tags=list(tags),
        id=run.run_id,
        name=run.name,
        resume="allow",
        dir=run.folder,
        config=dict(run.config),
        settings=library.Settings(console="off", x_disable_stats=True),
    )
    opened.define_metric("step", hidden=True)
    opened.define_metric("version", hidden=True)
    opened.define_metric("*", step_metric=run.axis)
    return WeightsAndBiases(run, opened)


class WeightsAndBiases:
    """Use `step` or `version` as the x axis: W&B's own step can only increase."""

    def __init__(self, run: TrackedRun, opened: Any) -> None:
        self.url = str(opened.url or run.folder / "wandb")
        self._run = opened
        self.rows = rows_in(run.folder) if opened.offline else _rows_of(opened.summary)

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """One entry each. W&B keeps it in a file and uploads it beside."""
        from wandb import Table

        for point in points:
            told: dict[str, Any] = dict(point.values)
            told |= {"step": point.step, "version": max(point.version, 0)}
            if point.samples:
                rows: Any = table(point.step, point.samples)
                told["samples"] = Table(columns=list(COLUMNS), data=rows)
            if point.index >= 0:
                told[ROW] = point.index
            self._run.log(told)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """Wait until everything is uploaded."""
        self._run.summary.update({"state": state, **{f"job/{k}": v for k, v in summary.items()}})
        self._end(0 if state == "succeeded" else 1)

    def close(self) -> None:
        """Wait until everything is uploaded; the run is resumed by its id."""
        self._end(0)

    def _end(self, exit_code: int) -> None:
        from wandb import teardown

        self._run.finish(exit_code=exit_code)
        # Else the library's own process may still have to write the last of the file.
        teardown()


def _rows_of(summary: Any) -> int:
    """Number of rows on the server, from the last logged value of each name."""
    last = summary.get(ROW)
    return 0 if last is None else int(last) + 1


def rows_in(folder: Path) -> int:
    """How many rows the files of offline runs hold."""
    rows = [int(entry[ROW]) + 1 for entry in history_in(folder) if ROW in entry]
    return max(rows, default=0)


def history_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Every entry of the history in the files below a folder, oldest file first."""
    protos: Any = import_module("wandb.proto.wandb_internal_pb2")
    for path in sorted(folder.glob("wandb/*run-*/*.wandb")):
        for content in _records(path.read_bytes()):
            record = protos.Record.FromString(content)
            if record.HasField("history"):
                items = record.history.item
                yield {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items}


def _records(content: bytes) -> Iterator[bytes]:
    """Records, put together from their parts; a cut one ends the file."""
    at, parts = _HEAD_BYTES, b""
    while at + _RECORD.size <= len(content):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _RECORD.size:
            at += left
            continue
        _, length, kind = _RECORD.unpack_from(content, at)
        begin = at + _RECORD.size
        at = begin + length
        if kind not in {_FULL, _FIRST, _MIDDLE, _LAST} or at > len(content):
            return
        parts = content[begin:at] if kind in {_FULL, _FIRST} else parts + content[begin:at]
        if kind in {_FULL, _LAST}:
            yield parts
