"""Installed plug-ins that do what the options of a job say, however bad it is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.plugins import EnvironmentPlugin, Keep

DEEDS: dict[str, Callable[[], Any]] = {
    "": lambda: "",
    "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit(3),
    "die": lambda: os._exit(4),
    "hang": lambda: time.sleep(3600),
    "eat": lambda: bytearray(64 << 30),
    "nonsense": lambda: 7,
}


def do(deed: str, path: str = "") -> Any:
    """A deed; one with a path only while there is a file at it."""
    return DEEDS[deed]() if not path or Path(path).exists() else ""


ENVIRONMENT = EnvironmentPlugin(tasks="hostile_worlds:tasks", world="nobody.plays.in:it")


def tasks(*, seed: int, deed: str = "", path: str = "", first: str = "") -> Any:
    """Sums, after a deed; `first` is done when a task is asked for."""
    do(deed, path)
    return Late(seed, first)


class Late(ArithmeticTasks):
    """Does its deed when a task is asked for."""

    def __init__(self, seed: int, deed: str) -> None:
        super().__init__(seed)
        self._deed = deed

    def __getitem__(self, position: int, /) -> Any:
        """A sum, or what the deed gives."""
        return do(self._deed) or super().__getitem__(position)


def sampler(size: int, *, seed: int, epochs: int | None, deed: str = "") -> Any:
    """One after another, after a deed."""
    del size, seed, epochs
    do(deed)
    return Straight()


class Straight:
    """One after another."""

    def __init__(self) -> None:
        self._at = 0

    def next(self) -> int:
        """The next one."""
        self._at += 1
        return self._at - 1

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return {"at": self._at}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._at = state["at"]


def group_filter(group: Any, *, deed: str = "", least: float = 0.0, only: int = 0) -> Any:
    """Keep one episode of each group, after a deed."""
    del group, least
    return do(deed) or Keep([only])


def advantage(batch: Any, context: Any, *, deed: str = "") -> Any:
    """The rewards themselves, after a deed."""
    del context
    return do(deed) or batch.rewards
