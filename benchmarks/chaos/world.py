"""Tasks, environment and reward of the jobs that faults are injected into.

Each task has a unique number, so an episode can be followed without Paceline's names. The reward is
a function of task and answer and is never 0, so any 0 is false. Both plug-ins fail according to the
file `mood.json` in the folder of their journals.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import zlib
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from chaos.journal import journal

from paceline.platform.digest import task_id
from paceline.platform.files import write_json
from paceline.plugins import EnvironmentPlugin, Message, Observation, RewardInput, StepResult
from paceline.types import Score, Task

NAME = "chaos"
MOOD = "mood.json"

WORTH = (0.25, 1.0)
EXIT_CODE = 9
_instances = count()
ENVIRONMENT = EnvironmentPlugin(tasks="chaos.world:CountedTasks", world="chaos.world:Counted")


def truth(task: str, answer: str) -> float:
    """The true reward of an answer to a task: one of two values, chosen by a digest."""
    return WORTH[zlib.crc32(f"{task}\0{answer}".encode()) & 1]


class CountedTasks:
    """`size` tasks numbered from `start`."""

    def __init__(self, seed: int = 0, *, size: int = 1000, start: int = 0, **options: Any) -> None:
        del seed, options
        self._size, self._start = size, start

    def __len__(self) -> int:
        """Number of tasks in an epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        payload = json.dumps({"number": self._start + position})
        return Task(task_id(NAME, payload, 0), NAME, payload)


class Counted:
    """Shows the number of its task and takes `turns` answers, pausing `pause_s` after each."""

    replayable = True

    def __init__(
        self, *, notes: str, turns: int = 2, pause_s: float = 0.05, held_out: bool = False, **_: Any
    ) -> None:
        self._notes, self._turns, self._pause_s = notes, turns, pause_s
        self._about: dict[str, Any] = {"held_out": held_out}
        self._heard = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        """Show the number."""
        number = json.loads(task.payload)["number"]
        self._about |= {"task": task.task_id, "seed": seed, "episode": next(_instances)}
        self._note("reset")
        return _say(f"{number:06d}=")

    async def step(self, action: str) -> StepResult:
        """Record the answer, whatever it is."""
        self._note("answered", words=action)
        await asyncio.sleep(self._pause_s)
        match mood(self._notes, "environment"):
            case "raise":
                raise ZeroDivisionError("an environment with a bug")
            case "hang":
                await asyncio.Event().wait()
            case "garbage":
                garbage: Any = "garbage"
                return garbage
            case "exit":
                leave(self._notes)
            case _:
                pass
        self._heard += 1
        return StepResult(_say("+"), reward=0.0, done=self._heard >= self._turns)

    async def close(self) -> None:
        """Record the end of this attempt."""
        if "episode" in self._about:
            self._note("closed")

    def _note(self, event: str, **more: Any) -> None:
        journal(self._notes, "environment").note(event, **self._about, **more)


def reward(item: RewardInput, *, notes: str, pause_s: float = 0.01) -> Score | float:
    """The true reward, unless a failure is due."""
    mine = journal(notes, "reward")
    mine.note("scoring", name=item.episode_id, task=item.task.task_id)
    time.sleep(pause_s)
    match mood(notes, "reward"):
        case "raise":
            raise ZeroDivisionError("a reward with a bug")
        case "hang":
            time.sleep(3600)
        case "garbage":
            return _garbage()
        case "exit":
            leave(notes)
        case _:
            pass
    mine.note("scored", name=item.episode_id, task=item.task.task_id, words=item.response)
    return truth(item.task.task_id, item.response)


def set_mood(notes: Path, *, of: str, how: str, until: float, share: float) -> None:
    """Let this share of the calls to a plug-in go wrong until then (Unix time)."""
    write_json(notes / MOOD, {"of": of, "mood": how, "until": until, "share": share})


def mood(notes: str, of: str) -> str:
    """How a call to a plug-in should fail; empty: it should not."""
    try:
        said = json.loads((Path(notes) / MOOD).read_text())
    except (OSError, ValueError):
        return ""
    due = said["of"] == of and time.time() < said["until"] and random.random() < said["share"]
    return str(said["mood"]) if due else ""


def leave(notes: str) -> NoReturn:
    """Exit like a crash in native code; only one process does so."""
    (Path(notes) / MOOD).unlink(missing_ok=True)
    os._exit(EXIT_CODE)


def _garbage() -> Any:
    return random.choice([float("nan"), "0", None, Score(reward=float("inf"), parts={}), [0.0]])


def _say(text: str) -> Observation:
    return Observation(messages=(Message("user", text),), text=text)
