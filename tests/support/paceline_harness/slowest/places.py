"""Finds out at which lines of tests and harness the main thread spends its time."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_EVERY_S = 0.05
_DEEPEST = 60


class Places:
    """Looks at the main thread 20 times a second; counts seconds per line.

    A line is the innermost one below `folder` of the stack, or, while an event loop waits, of the
    coroutines that the loop's main task awaits.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self._looks: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="places", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no longer."""
        self._ends.set()
        self._thread.join()

    def take(self) -> dict[str, float]:
        """Seconds per line since the last call, most first; at most five lines."""
        with self._lock:
            counts, self._looks = self._looks, Counter()
        return {place: _EVERY_S * looks for place, looks in counts.most_common(5)}

    def _run(self) -> None:
        main = threading.main_thread().ident
        while not self._ends.wait(_EVERY_S):
            # Kept in no variable: it would hold what the test has let go until the next look.
            place = self._place(
                sys._current_frames().get(main or 0)  # pyright: ignore[reportPrivateUsage]
            )
            with self._lock:
                self._looks[place] += 1

    def _place(self, frame: FrameType | None) -> str:
        place = ""
        while frame is not None:
            if task := _task_of(frame):
                return self._line(awaited(task)) or place or "an event loop"
            place = place or self._line([(frame.f_code, frame.f_lineno)])
            frame = frame.f_back
        return place or "pytest"

    def _line(self, lines: list[tuple[CodeType, int]] | Iterator[tuple[CodeType, int]]) -> str:
        """The last one below the folder."""
        found = ""
        for code, number in lines:
            if code.co_filename.startswith(self._folder):
                name = code.co_filename.removeprefix(self._folder)
                found = f"{name}:{number} {code.co_name}"
        return found


def awaited(task: asyncio.Task[Any]) -> Iterator[tuple[CodeType, int]]:
    """Code and line of each coroutine that a task awaits, outermost first, other tasks included."""
    waits: Any = task.get_coro()
    for _ in range(_DEEPEST):
        if isinstance(waits, asyncio.Task):
            waits = waits.get_coro()
        elif isinstance(waits, asyncio.Future):
            return
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "ag_frame", None)
        if frame is not None:
            yield frame.f_code, frame.f_lineno
        # What a running one awaits is undefined: CPython would read beyond its stack.
        if getattr(waits, "cr_running", False) or getattr(waits, "ag_running", False):
            return
        waits = getattr(waits, "cr_await", None) or getattr(waits, "ag_await", None)


def _task_of(frame: FrameType) -> asyncio.Task[Any] | None:
    """The task that `run_until_complete` of this frame waits for."""
    if frame.f_code.co_name != "run_until_complete":
        return None
    future = frame.f_locals.get("future")
    return future if isinstance(future, asyncio.Task) else None
