"""The grid with a key and a door: what is told, what pays, and which tasks there are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from paceline.config.options import wrong_options
from paceline.environments.key_door.grid import way
from paceline.environments.key_door.tasks import KeyDoorTasks
from paceline.environments.key_door.world import KeyDoor
from paceline.errors import InvalidError
from paceline.plugins import StepResult
from paceline.types import Task


def grid(**places: Any) -> Task:
    found = {"width": 3, "start": [0, 0], "key": [0, 1], "door": [1, 0], "walls": [], **places}
    return Task("t", "key_door", json.dumps(found))


async def play(task: Task, moves: Iterable[str], **options: Any) -> list[StepResult]:
    world, results = KeyDoor(**options), list[StepResult]()
    await world.reset(task, 0)
    for move in moves:
        results.append(await world.step(move))
        if results[-1].done:
            break
    return results


def told(results: list[StepResult]) -> list[str]:
    return [message.content for result in results for message in result.observation.messages]


async def test_the_door_opens_only_with_the_key() -> None:
    shown = await KeyDoor().reset(grid(walls=[[2, 2]]), 0)
    assert shown.messages[0].content.endswith("Key at 0 1, door at 1 0, walls at 2 2, you at 0 0.")
    assert shown.messages[0].content in shown.text
    moves = ["right", "I go LEFT.", "left", "hm", "not right but up", "right", "down"]
    results = await play(grid(), moves)
    assert told(results) == [
        "locked at 1 0",
        "at 0 0",
        "wall at 0 0",
        "up, down, left or right? at 0 0",
        "key at 0 1",
        "at 1 1",
    ]
    assert [result.reward for result in results] == [0.0] * 6 + [1.0]
    assert [result.done for result in results] == [False] * 6 + [True]
    assert results[0].observation.text == "\nlocked at 1 0\n"


async def test_walls_block() -> None:
    results = await play(grid(walls=[[1, 1]]), ["up", "right"])
    assert told(results) == ["key at 0 1", "wall at 0 1"]


@pytest.mark.parametrize(
    ("scoring", "rewards"), [("found", [0.0, 0.0, 1.0]), ("shaped", [0.5, 0.0, 0.5])]
)
async def test_the_key_alone_may_be_worth_something(scoring: Any, rewards: list[float]) -> None:
    results = await play(grid(), ["up", "down", "right"], scoring=scoring)
    assert [result.reward for result in results] == rewards
    again = await play(grid(), ["up", "down", "up", "down"], scoring=scoring, max_turns=4)
    assert sum(result.reward for result in again) == rewards[0]
    assert again[-1].done


@pytest.mark.parametrize("walls", [0, 3])
async def test_every_task_is_solved_by_as_many_moves_as_its_domain_says(walls: int) -> None:
    tasks = KeyDoorTasks(0, walls=walls, size=200)
    for position in range(len(tasks)):
        task = tasks[position]
        payload = json.loads(task.payload)
        start, key, door, *blocked = (
            (each[0], each[1])
            for each in (payload["start"], payload["key"], payload["door"], *payload["walls"])
        )
        assert len({start, key, door, *blocked}) == 3 + walls
        there = way(start, key, width=4, walls=blocked)
        back = way(key, door, width=4, walls=blocked)
        assert there is not None
        assert back is not None
        assert task.domain == f"key_door/{len(there) + len(back)}"
        results = await play(task, [*there, *back], max_turns=64)
        assert (results[-1].reward, len(results)) == (1.0, len(there) + len(back))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_as_many_walls_as_are_allowed_always_find_room(width: int) -> None:
    tasks = KeyDoorTasks(0, width=width, walls=width - 1)
    for position in range(len(tasks)):
        assert len(json.loads(tasks[position].payload)["walls"]) == width - 1


def test_all_places_are_in_one_split() -> None:
    splits = [KeyDoorTasks(seed, split=s) for seed, s in ((0, "train"), (1, "heldout"))]  # type: ignore[arg-type]
    payloads = [{tasks[i].payload for i in range(len(tasks))} for tasks in splits]
    assert [len(each) for each in payloads] == [2688, 672]
    assert not payloads[0] & payloads[1]
    assert KeyDoorTasks(5)[0] != KeyDoorTasks(6)[0]
    with pytest.raises(IndexError):
        splits[0][2688]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"width": 1}, "o.width: Input should be greater than or equal to 2"),
        ({"scoring": "x"}, "o.scoring: Input should be 'found' or 'shaped'"),
        ({"max_turns": 65}, "o.max_turns: Input should be less than or equal to 64"),
    ],
)
def test_wrong_options_are_refused_at_submit(options: dict[str, Any], line: str) -> None:
    (found,) = wrong_options("o", "environments", "key_door", options)
    assert found.startswith(line)


def test_options_that_do_not_fit_each_other_are_named() -> None:
    with pytest.raises(InvalidError, match=r"options\.walls: 4; with width 4 allowed: 0 to 3"):
        KeyDoorTasks(walls=4)
    with pytest.raises(InvalidError, match=r"options\.max_turns: 1; allowed: 2 to 64"):
        KeyDoor(max_turns=1)
