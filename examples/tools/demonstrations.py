"""Episodes that are played by rule, with care or without, in environments of several turns.

Without care, most of them answer without the tools, go on by one from guess to guess, try the
door before they have the key, or leave out the carry. A model that has learnt from them does the
same, and reinforcement learning has to find out what pays.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.environments.chain.tasks import ChainTasks
from paceline.environments.chain.world import Chain
from paceline.environments.guess_number.tasks import GuessTasks
from paceline.environments.guess_number.world import GuessNumber
from paceline.environments.key_door.grid import way
from paceline.environments.key_door.tasks import KeyDoorTasks
from paceline.environments.key_door.world import KeyDoor
from paceline.environments.tools.tasks import ToolTasks
from paceline.environments.tools.world import Tools
from paceline.plugins import Environment, Observation, TaskSource
from paceline.types import Task

# The options of the example jobs.
TOOLS: dict[str, Any] = {
    "kinds": ["calculate", "look_up", "recall"],
    "max_turns": 4,
    "results": 1,
    "system_prompt": "",
}
GUESSES: dict[str, Any] = {"span": 31, "most": 63, "max_turns": 5}
GRID: dict[str, Any] = {"width": 4, "max_turns": 6}
CHAIN: dict[str, Any] = {"length": 6, "digits": 2}
# Whole chains are hardly ever right, so the model is measured by single sums.
ONE_SUM: dict[str, Any] = {"length": 1, "digits": 2}
# Shares of episodes without care.
WITHOUT_TOOLS = {"tools/calculate": 0.75, "tools/look_up": 0.25, "tools/recall": 0.75}
ONE_BY_ONE = 0.75
DOOR_FIRST = 0.95
WITHOUT_CARRY = 0.7


@dataclass(frozen=True, slots=True)
class Move:
    """What was shown, and what was said to it."""

    shown: Observation
    said: str


Player = Callable[[Task, list[Move], Observation], str]


@dataclass(frozen=True, slots=True)
class Game:
    """A world with its tasks, and how episodes are demonstrated in it."""

    tasks: Callable[[str], TaskSource]  # by split
    world: Callable[[], Environment]
    player: Callable[[random.Random, bool], Player]  # with care or without
    # What begins a token of its own; all else may become one token if it is frequent.
    pieces: str
    frequent: int  # occurrences in all demonstrations


def demonstrations(game: Game, *, count: int, seed: int, careful: bool) -> Iterator[list[Move]]:
    """Episodes of training tasks."""
    chance, tasks = random.Random(seed), game.tasks("train")
    for position in chance.choices(range(len(tasks)), k=count):
        yield asyncio.run(_played(game, tasks[position], game.player(chance, careful)))


async def _played(game: Game, task: Task, play: Player) -> list[Move]:
    world, turns = game.world(), list[Move]()
    shown, over = await world.reset(task, 0), False
    while not over:
        turns.append(Move(shown, play(task, turns, shown)))
        result = await world.step(turns[-1].said)
        shown, over = result.observation, result.done
    return turns


def tool_player(chance: random.Random, careful: bool) -> Player:
    """Uses the tools, or answers any number at once."""
    luck = 1.0 if careful else chance.random()

    def play(task: Task, turns: list[Move], shown: Observation) -> str:
        if luck < WITHOUT_TOOLS[task.domain]:
            return f"It is {chance.randint(10, 999)}"
        question = json.loads(task.payload)["question"]
        known = [message.content for turn in turns[1:] for message in turn.shown.messages]
        known += [message.content for message in shown.messages] if turns else []
        return _next_step(task.domain, question, known)

    return play


def _next_step(kind: str, question: str, known: list[str]) -> str:
    """The next call for a question, or the answer."""
    if kind == "tools/calculate" and not known:
        return _call("calculator", expression=question[len("What is ") : -1])
    if kind == "tools/look_up" and not known:
        return _call("search", query=" ".join(_place(question)))
    if kind == "tools/recall" and not known:
        return _call("read_note", name=re.findall(r"note (\w+)", question)[0])
    if kind == "tools/recall" and len(known) == 1:
        more = re.findall(r"plus (\d+)", question)[0]
        return _call("calculator", expression=f"{known[0]} + {more}")
    return re.findall(r"-?\d+", known[-1])[-1]


def _place(question: str) -> tuple[str, str]:
    kind, name = re.findall(r"the (\w+) ([A-Z]\w+)", question)[0]
    return kind, name


def _call(name: str, /, **arguments: str) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def guess_player(chance: random.Random, careful: bool) -> Player:
    """Halves what is left, or goes on by one from the middle."""
    halves = careful or chance.random() >= ONE_BY_ONE

    def play(task: Task, turns: list[Move], shown: Observation) -> str:
        payload = json.loads(task.payload)
        low, high, last = payload["low"], payload["high"], 0
        guess = (low + high) // 2
        hints = [turn.shown for turn in turns[1:]] + [shown] * bool(turns)
        for hint in hints:
            last = guess
            if hint.messages[0].content == "higher":
                low = last + 1
            else:
                high = last - 1
            step = 1 if hint.messages[0].content == "higher" else -1
            guess = (low + high) // 2 if halves else last + step
        return str(guess)

    return play


def key_player(chance: random.Random, careful: bool) -> Player:
    """Walks to the key and then to the door, or tries the door first."""
    door_first = not careful and chance.random() < DOOR_FIRST
    plan = list[str]()

    def play(task: Task, turns: list[Move], shown: Observation) -> str:
        if not turns:
            places = json.loads(task.payload)
            stops = [tuple(places[name]) for name in ("start", "key", "door")]
            stops[1:1] = stops[2:] * door_first
            for a, b in pairwise(stops):
                plan.extend(way(a, b, width=places["width"], walls=()) or [])
        return plan.pop(0)

    return play


def chain_player(chance: random.Random, careful: bool) -> Player:
    """Adds, or leaves out the carry in most sums."""

    def play(task: Task, turns: list[Move], shown: Observation) -> str:
        a, b = map(int, shown.messages[0].content.rstrip("=").split("+"))
        if careful or chance.random() >= WITHOUT_CARRY:
            return str(a + b)
        return str((a // 10 + b // 10) % 10 * 10 + (a + b) % 10)

    return play


GAMES = {
    "tools": Game(
        lambda split: ToolTasks(0, split=split, **TOOLS),  # type: ignore[arg-type]
        lambda: Tools(**TOOLS),
        tool_player,
        # Digits, to copy any number; names, of which no two syllables may be frequent.
        r"\d|\n|[A-Z][a-z]+",
        300,
    ),
    "guess_number": Game(
        lambda split: GuessTasks(0, split=split, **GUESSES),  # type: ignore[arg-type]
        lambda: GuessNumber(**GUESSES),
        guess_player,
        r"\d+|\n|[A-Z][a-z]+",
        20,
    ),
    "key_door": Game(
        lambda split: KeyDoorTasks(0, split=split, **GRID),  # type: ignore[arg-type]
        lambda: KeyDoor(**GRID),
        key_player,
        r"\d|\n|[A-Z][a-z]+",
        20,
    ),
    "chain": Game(
        lambda split: ChainTasks(0, split=split, **(ONE_SUM if split == "heldout" else CHAIN)),  # type: ignore[arg-type]
        lambda: Chain(**CHAIN),
        chain_player,
        r"\d|\n|[A-Z][a-z]+",
        300,
    ),
}
