"""Environments of Gymnasium, played in text."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.environments.gymnasium.spaces import Actions, parts, shown
from paceline.environments.gymnasium.tasks import GymnasiumTasks
from paceline.environments.gymnasium.world import GymnasiumWorld
from paceline.errors import InvalidError
from paceline.plugins import StepResult
from paceline.types import Task

LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
MOVES = ("left", "down", "right", "up")
ACTIONS = [
    (spaces.Discrete(4), MOVES),
    (spaces.Discrete(4), ()),
    (spaces.Discrete(3, start=-1), ()),
    (spaces.MultiDiscrete([3, 200]), ()),
    (spaces.MultiBinary(3), ()),
    (spaces.Box(-1.0, 1.0, (2,), np.float32), ()),
    (spaces.Box(0, 255, (2, 1), np.uint8), ()),
    (spaces.Text(8, charset="abc"), ()),
]
WORDS = st.sampled_from([*MOVES, "0", "3", "-1", "2.5", "9" * 30, "٣", ",", " ", "\n", "abc", "ß"])
REPLIES = st.text() | st.lists(WORDS).map(" ".join)


def a_task(**options: Any) -> Task:
    return GymnasiumTasks(0, **options)[0]


async def played(replies: list[str], **options: Any) -> list[StepResult]:
    world = GymnasiumWorld(**options)
    await world.reset(a_task(**options), 0)
    try:
        return [await world.step(each) for each in replies]
    finally:
        await world.close()


@pytest.mark.parametrize(("space", "names"), ACTIONS, ids=str)
@pytest.mark.parametrize("exact", [False, True])
@given(reply=REPLIES)
def test_any_reply_is_an_action_or_none(
    space: gymnasium.Space[Any], names: tuple[str, ...], exact: bool, reply: str
) -> None:
    action = Actions(space, names, exact=exact).parsed(reply)
    assert action is None or space.contains(action)


@pytest.mark.parametrize(
    ("space", "names", "reply", "last", "exact"),
    [
        (ACTIONS[0][0], MOVES, "Not left. RIGHT!", 2, None),
        (ACTIONS[0][0], MOVES, " Down\n", 1, 1),
        (ACTIONS[0][0], MOVES, "2", None, None),
        (ACTIONS[0][0], MOVES, "upright", None, None),
        (ACTIONS[1][0], (), "I go 3", 3, None),
        (ACTIONS[1][0], (), "3, or 4", None, None),
        (ACTIONS[2][0], (), "-1", -1, -1),
        (ACTIONS[3][0], (), "first 2, 150", [2, 150], None),
        (ACTIONS[3][0], (), "2 150", [2, 150], [2, 150]),
        (ACTIONS[3][0], (), "2", None, None),
        (ACTIONS[5][0], (), "0.5, -1", [0.5, -1.0], [0.5, -1.0]),
        (ACTIONS[6][0], (), "1 256", None, None),
        (ACTIONS[7][0], (), "cab", "cab", "cab"),
        (ACTIONS[7][0], (), "cabbage", None, None),
    ],
)
def test_which_action_a_reply_is(
    space: gymnasium.Space[Any], names: tuple[str, ...], reply: str, last: Any, exact: Any
) -> None:
    for wanted, whole in ((last, False), (exact, True)):
        found = Actions(space, names, exact=whole).parsed(reply)
        assert (found.ravel().tolist() if isinstance(found, np.ndarray) else found) == wanted


def test_values_of_spaces_as_text() -> None:
    hand = spaces.Tuple((spaces.Discrete(32), spaces.Discrete(2)))
    place = spaces.Dict(at=spaces.Box(-9, 9, (2,)), door=spaces.Discrete(2), says=spaces.Text(9))
    value = {"at": np.array([0.12345, -2]), "door": 1, "says": "hello"}
    board = spaces.MultiDiscrete(np.array([[3, 3], [3, 3]]))
    assert shown(spaces.Discrete(2), 1, ("shut", "open")) == "open"
    assert (shown(hand, (15, 1)), parts(hand, (15, 1))) == ("15, 1", {"0": "15", "1": "1"})
    assert shown(place, value) == "at: 0.123 -2\ndoor: 1\nsays: hello"
    assert parts(place, value)["says"] == "hello"
    assert shown(board, np.array([[0, 1], [2, 0]])) == "0 1\n2 0"
    with pytest.raises(InvalidError, match="observations of Sequence cannot be written"):
        shown(spaces.Sequence(spaces.Discrete(2)), ())
    with pytest.raises(InvalidError, match="27648 numbers; at most 4096"):
        shown(spaces.Box(0, 255, (96, 96, 3)), np.zeros((96, 96, 3)))


async def test_an_episode_is_played_in_names_to_its_reward() -> None:
    options = {
        **LAKE,
        "actions": MOVES,
        "template": "at {observation}",
        "prompt": "{render}|{actions}",
    }
    world = GymnasiumWorld(**options)
    first = await world.reset(a_task(**options), 0)
    grid, _, actions = first.text.partition("|")
    assert grid == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert actions == "left, down, right, up"
    path = ["down", "down", "right", "right", "down", "right"]
    results = [await world.step(each) for each in path]
    assert results[0].observation.messages[0].content == "at 4"
    assert [each.done for each in results] == [False] * 5 + [True]
    assert sum(each.reward for each in results) == 1.0


async def test_a_reply_that_is_no_action_is_told_costs_and_counts() -> None:
    fine, wrong, last = await played(
        ["1", "sideways", "1"], **LAKE, max_turns=3, invalid_reward=-0.5
    )
    assert (fine.reward, wrong.reward) == (0.0, -0.5)
    assert wrong.observation.text == "Not an action. Actions: 0 to 3"
    assert (wrong.done, wrong.truncated, last.truncated) == (False, False, True)
    (ends,) = await played(["sideways"], **LAKE, invalid_ends=True)
    assert (ends.done, ends.truncated) == (True, False)


async def test_time_limits_of_gymnasium_truncate() -> None:
    results = await played(["0"] * 3, id="FrozenLake-v1", kwargs={"max_episode_steps": 3})
    assert [each.truncated for each in results] == [False, False, True]


async def test_groups_begin_alike_and_splits_never() -> None:
    options = {"id": "Blackjack-v1", "size": 200}
    train = {GymnasiumTasks(0, **options)[place].payload for place in range(200)}
    held_out = {
        GymnasiumTasks(0, **options, split="heldout")[place].payload for place in range(200)
    }
    assert len(train) == len(held_out) == 200
    assert not train & held_out
    task = a_task(**options)
    shown_to = {(await GymnasiumWorld(**options).reset(task, seed)).text for seed in range(4)}
    assert len(shown_to) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"id": "os:FrozenLake-v1"}, "an id that is registered, without a module"),
        ({"id": "FrozenLake-v1", "size": 0}, "greater than or equal to 1"),
        ({"id": "FrozenLake-v1", "seed": 0, "maps": 1}, "Extra inputs"),
    ],
)
def test_options_that_are_refused_at_submit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        GymnasiumTasks(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"id": "FrozenLak-v1"}, "tasks.options.id: 'FrozenLak-v1': .*Did you mean"),
        ({"id": "FrozenLake-v1", "kwargs": {"slippery": 1}}, "tasks.options: gymnasium.make"),
        ({"id": "FrozenLake-v1", "actions": ("l", "r")}, "actions: 2 names for 4 actions"),
        ({"id": "FrozenLake-v1", "prompt": "{0}"}, r"prompt: \{0\}; allowed: actions"),
    ],
)
async def test_options_that_do_not_fit_the_environment(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidError, match=text):
        await GymnasiumWorld(**options).reset(a_task(**options), 0)


class Counted(gymnasium.Env[Any, Any]):
    """Counts how many there are; fails after action 1."""

    made = 0
    observation_space: spaces.Space[Any] = spaces.Discrete(1 << 20)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, **more: Any) -> None:
        del more
        type(self).made += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        del seed, options
        return self.made, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise RuntimeError("it broke")
        return 0, 1.0, True, False, {}


async def test_environments_are_reset_for_the_next_episode_unless_they_have_failed() -> None:
    gymnasium.register("Counted-v0", Counted)
    try:
        for _ in range(3):
            await played(["0"], id="Counted-v0")
        assert Counted.made == 1
        with pytest.raises(RuntimeError, match="it broke"):
            await played(["1"], id="Counted-v0")
        await played(["0"], id="Counted-v0")
        assert Counted.made == 2
        await played(["0"], id="Counted-v0", reuse=False)
        await played(["0"], id="Counted-v0", reuse=False)
        assert Counted.made == 3
    finally:
        del gymnasium.registry["Counted-v0"]


def test_tasks_are_seeds() -> None:
    assert json.loads(a_task(**LAKE).payload).keys() == {"seed"}
