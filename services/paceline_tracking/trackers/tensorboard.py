"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.plugins import TrackedPoint, TrackedRun
from paceline_tracking.trackers.tables import markdown, place, table

ROW = "paceline/row"
_LENGTH = struct.Struct("<Q")
_CRC_BYTES = 4


def tensorboard(run: TrackedRun) -> TensorBoard:
    """A tracker that appends to the run's folder."""
    return TensorBoard(run)


class TensorBoard:
    """One event for each point, so that a row is there whole or not at all.

    Each kind has a folder, a run of its own for TensorBoard: a rewind takes back what came after
    its step, and must not take back what is of another kind.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.url = str(run.folder)
        self.rows = rows_in(run.folder)
        self._run = run
        self._writers: dict[str, Any] = {}
        self._last = {kind: last_in(run.folder / kind) for kind in ("train", "eval", "system")}
        if self.rows == 0:
            self._text("config", "job", _code(run.config), 0)

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """One event each."""
        for point in points:
            self._point(point)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """The summary as a text."""
        self._text("config", "summary", _code({"state": state, **summary}), 1)

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _point(self, point: TrackedPoint) -> None:
        step = place(self._run, point)
        if point.samples:
            self._text("samples", "samples", markdown(table(step, point.samples)), step)
        self._rewind(point.kind, step)
        values: dict[str, float] = dict(point.values)
        if point.index >= 0:
            values[ROW] = float(point.index)
        summary = _proto("summary_pb2").Summary
        found = [summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._event(point.kind, step=step, summary=summary(value=found))

    def _rewind(self, kind: str, step: int) -> None:
        """A step that has been there already: TensorBoard drops what it has from there on."""
        last = self._last[kind]
        if self._run.axis == "step" and kind != "system" and last is not None and step <= last:
            self._start(kind, step)
        self._last[kind] = step

    def _start(self, kind: str, step: int) -> None:
        log = _proto("event_pb2").SessionLog
        self._event(kind, step=step, session_log=log(status=log.START))

    def _text(self, kind: str, tag: str, text: str, step: int) -> None:
        from tensorboardX.summary import text as text_summary

        self._event(kind, step=step, summary=text_summary(tag, text))

    def _event(self, kind: str, *, step: int, **content: Any) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        if kind not in self._writers:
            folder = self._run.folder / kind
            folder.mkdir(parents=True, exist_ok=True)
            # Files are read in the order of their names; lives may begin in the same second.
            number = len(list(folder.iterdir()))
            self._writers[kind] = EventsWriter(str(folder / f"events.{number:06d}"))
            if number == 0:
                self._start(kind, 0)  # the first one is the beginning, later ones are rewinds
        event = _proto("event_pb2").Event(wall_time=time.time(), step=step, **content)
        self._writers[kind].write_event(event)
        # Row by row: those of two files must not overtake each other.
        self._writers[kind].flush()


def rows_in(folder: Path) -> int:
    """How many rows of the history the event files hold."""
    tags = (
        value
        for event in (*events_in(folder / "train"), *events_in(folder / "eval"))
        for value in event.summary.value
        if value.tag == ROW
    )
    return max((int(value.simple_value) + 1 for value in tags), default=0)


def last_in(folder: Path) -> int | None:
    """The step of the last point."""
    steps = [event.step for event in events_in(folder) if event.summary.value]
    return steps[-1] if steps else None


def events_in(folder: Path) -> Iterator[Any]:
    """All whole events, in the order in which they were written."""
    events = _proto("event_pb2")
    for path in sorted(folder.glob("*tfevents*")):
        for record in _records(path.read_bytes()):
            yield events.Event.FromString(record)


def _records(content: bytes) -> Iterator[bytes]:
    """Records of a TFRecord file: length, its checksum, bytes, theirs. A cut one ends the file."""
    at = 0
    while at + _LENGTH.size + _CRC_BYTES <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        begin = at + _LENGTH.size + _CRC_BYTES
        at = begin + length + _CRC_BYTES
        if at > len(content):
            return
        yield content[begin : begin + length]


def _code(value: Mapping[str, Any]) -> str:
    lines = json.dumps(value, indent=2, default=str).splitlines()
    return "\n".join(f"    {line}" for line in lines)


def _proto(module: str) -> Any:
    return import_module(f"tensorboardX.proto.{module}")
