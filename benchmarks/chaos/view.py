"""The current state of episodes and scores, from the journals of the plug-ins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from chaos.journal import Reader

Key = tuple[str, int]  # task and seed: identify a group across workers and names


@dataclass(slots=True)
class Attempt:
    """An episode in an environment worker."""

    pid: int
    key: Key
    held_out: bool
    since: float  # its last event
    turn_over: bool  # an answer has come, and the environment processes it


class View:
    """Follows the journals; `look` reads new events."""

    def __init__(self, notes: Path) -> None:
        self._reader = Reader(notes)
        self.events: list[dict[str, Any]] = []
        self.attempts: dict[tuple[int, int], Attempt] = {}  # by pid and number there
        self.scoring: dict[str, int] = {}  # pid by name of the episode

    def look(self) -> None:
        """Read new events."""
        for event in self._reader.news():
            self.events.append(event)
            self._take(event)

    def since(self, at: float) -> Iterator[dict[str, Any]]:
        """Events after a moment, newest first."""
        for event in reversed(self.events):
            if event["at"] > at:
                yield event
            elif event["at"] < at - 30.0:  # nearly sorted: files are read in sequence
                return

    def first(self, since: float, wanted: Callable[[dict[str, Any]], bool]) -> float | None:
        """Time of the first matching event after a moment."""
        times = [event["at"] for event in self.since(since) if wanted(event)]
        return min(times, default=None)

    def open_at(self, pids: set[int]) -> list[Attempt]:
        """Training episodes in progress in these processes."""
        found = self.attempts.values()
        return [each for each in found if each.pid in pids and not each.held_out]

    def forget_dead(self) -> None:
        """Discard the episodes and scores of dead processes."""
        pids = {each.pid for each in self.attempts.values()} | set(self.scoring.values())
        dead = {pid for pid in pids if not psutil.pid_exists(pid)}
        self.attempts = {k: v for k, v in self.attempts.items() if v.pid not in dead}
        self.scoring = {k: v for k, v in self.scoring.items() if v not in dead}

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "reset" | "answered":
                self.attempts[event["pid"], event["episode"]] = Attempt(
                    pid=event["pid"],
                    key=(event["task"], event["seed"]),
                    held_out=event["held_out"],
                    since=event["at"],
                    turn_over=event["event"] == "answered",
                )
            case "closed":
                self.attempts.pop((event["pid"], event["episode"]), None)
            case "scoring":
                self.scoring[event["name"]] = event["pid"]
            case "scored":
                self.scoring.pop(event["name"], None)
            case _:
                pass


Sign = Callable[[], float | None]


def wait_for_sign(view: View, sign: Sign, timeout_s: float) -> float | None:
    """Time of the sign; None if it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        view.look()
        if (at := sign()) is not None:
            return at
        time.sleep(0.1)
    return None
