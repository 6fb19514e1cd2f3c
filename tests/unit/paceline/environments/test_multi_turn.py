"""The built-in environments of several turns: what they say, what it is worth, when they end."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.options import wrong_options
from paceline.environments.guess_number.tasks import GuessTasks
from paceline.environments.guess_number.world import GuessNumber
from paceline.environments.tools.calculator import calculator
from paceline.environments.tools.corpus import NUM_FACTS, fact, index
from paceline.environments.tools.notes import MAX_NOTES, Notes
from paceline.environments.tools.tasks import ToolTasks
from paceline.environments.tools.world import Tools
from paceline.errors import InvalidError
from paceline.plugins import Observation, StepResult, TaskSource
from paceline.types import Task

EXPRESSIONS = st.recursive(
    st.integers(0, 10**6).map(str) | st.floats(0, 1e9).map(str) | st.text("0123456789.eE+-*/%() x"),
    lambda each: st.tuples(each, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), each).map(
        "({0[0]}){0[1]}({0[2]})".format
    ),
    max_leaves=8,
)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def first(tasks: TaskSource) -> Task:
    return tasks[0]


async def asked(kind: str, **options: Any) -> tuple[Tools, dict[str, Any], Observation]:
    """A world, the payload of its task, and what it shows first."""
    task = first(ToolTasks(0, kinds=[kind], **options))  # type: ignore[list-item]
    world = Tools(kinds=[kind], **options)
    return world, json.loads(task.payload), await world.reset(task, 0)


def said(result: StepResult) -> list[str]:
    return [message.content for message in result.observation.messages]


async def test_a_question_is_looked_up_and_answered() -> None:
    world, payload, shown = await asked("look_up")
    assert [tool["function"]["name"] for tool in shown.tools] == [
        "calculator",
        "search",
        "write_note",
        "read_note",
    ]
    place = payload["question"].split(",")[0].split(" the ")[1]
    result = await world.step(call("search", query=place))
    assert (result.reward, result.done) == (0.0, False)
    (sentences,) = said(result)
    assert place in sentences.splitlines()[0]
    assert len(sentences.splitlines()) == 3
    end = await world.step(f"It is {payload['answer']} units.")
    assert (end.reward, end.done) == (1.0, True)


async def test_several_calls_of_a_turn_are_answered_in_order() -> None:
    world, payload, _ = await asked("recall")
    ((name, number),) = payload["notes"].items()
    turn = call("read_note", name=name) + call("calculator", expression="2 ** 10 - 1")
    result = await world.step(turn + call("write_note", name="n", text="x") + "<tool_call>?")
    assert said(result)[:3] == [number, "1023", "written"]
    assert said(result)[3].startswith("error: the call is not JSON")
    assert [each.name for each in result.observation.messages[:2]] == ["read_note", "calculator"]
    assert said(await world.step(call("read_note", name="n"))) == ["x"]
    assert (await world.step("no idea")).reward == 0.0


@pytest.mark.parametrize(("max_turns", "limit"), [(8, 4), (3, 3)])
async def test_a_task_has_a_limit_of_turns_within_that_of_the_job(
    max_turns: int, limit: int
) -> None:
    world, payload, _ = await asked("calculate", max_turns=max_turns)
    assert payload["max_turns"] == 4
    results = [await world.step(call("calculator", expression="1+1")) for _ in range(limit)]
    assert [result.done for result in results] == [False] * (limit - 1) + [True]
    assert not any(result.reward for result in results)


async def test_answers_of_all_kinds_are_right() -> None:
    tasks = ToolTasks(1, size=400)
    for position in range(len(tasks)):
        payload = json.loads(tasks[position].payload)
        question, world = payload["question"], Tools()
        await world.reset(tasks[position], 0)
        match tasks[position].domain:
            case "tools/calculate":
                expression = question[len("What is ") : -1]
            case "tools/recall":
                (note,), more = payload["notes"].values(), question.split("plus ")[1][:-1]
                expression = f"{note} + {more}"
            case kind:
                names = [word.strip(",") for word in question.split() if word.istitle()][1:]
                numbers = [index().best(name, 1)[0].split(" is ")[1].split()[0] for name in names]
                expression = " - ".join(numbers)
                assert len(names) == (2 if kind == "tools/compare" else 1)
        (answer,) = said(await world.step(call("calculator", expression=expression)))
        assert answer == payload["answer"]
        assert (await world.step(answer)).reward == 1.0


@pytest.mark.parametrize(
    "make", [partial(ToolTasks, size=4000), GuessTasks], ids=["tools", "guess_number"]
)
def test_held_out_tasks_are_never_trained_on(make: Any) -> None:
    train, again, heldout = make(seed=0), make(seed=5), make(seed=1, split="heldout")
    payloads = [{tasks[i].payload for i in range(len(tasks))} for tasks in (train, again, heldout)]
    assert payloads[2]
    assert not (payloads[0] | payloads[1]) & payloads[2]
    assert [train[i] for i in range(9)] == [make(seed=0)[i] for i in range(9)]
    assert [train[i] for i in range(9)] != [again[i] for i in range(9)]
    with pytest.raises(IndexError):
        train[len(train)]


def test_every_place_is_found_by_its_name() -> None:
    facts = [fact(number) for number in range(NUM_FACTS)]
    assert len({each.name for each in facts}) == NUM_FACTS
    for each in facts[::37]:
        assert index().best(f"{each.kind} {each.name}", 1) == [each.sentence]
    assert index().best('" OR * -(', 3) == []


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        (" (2 + 3) * -4 ", "-20"),
        ("7 / 2", "3.5"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 0.5", "1.41421356237"),
        ("2 ** -1", "0.5"),
        ("0.1 + 0.2", "0.3"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "cannot be read"),
        ("1 +", "cannot be read"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 400 * 1.0", "too large"),
        ("1e308 * 10", "too large"),
        ("(-8) ** 0.5", "root of a negative"),
        ("1" * 201, "more than 200"),
        ("__import__('os')", "allowed: numbers"),
        ("'a' * 9", "allowed: numbers"),
        ("True + 1", "allowed: numbers"),
        ("1 << 99", "allowed: numbers"),
        ("(" * 100 + "1" + ")" * 99, "cannot be read"),
    ],
)
def test_the_calculator_refuses(expression: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        calculator(expression)


@given(EXPRESSIONS)
def test_no_expression_breaks_the_calculator(expression: str) -> None:
    with suppress(ValueError):
        assert len(calculator(expression)) < 200


def test_notes_are_bounded() -> None:
    notes = Notes({})
    for number in range(MAX_NOTES):
        notes.write_note(str(number), "x")
    assert notes.write_note("0", "y") == "written"
    assert notes.read_note("0") == "y"
    with pytest.raises(ValueError, match="at most 64 notes"):
        notes.write_note("more", "x")
    with pytest.raises(ValueError, match="at most 1000 characters"):
        notes.write_note("0", "x" * 1000)
    with pytest.raises(ValueError, match=r"no note of this name; there are: 0, 1, 2"):
        notes.read_note("more")


async def play(world: GuessNumber, task: Task, guesses: list[str]) -> list[StepResult]:
    shown = await world.reset(task, 0)
    payload = json.loads(task.payload)
    assert f"from {payload['low']} to {payload['high']}" in shown.messages[0].content
    assert shown.messages[0].content in shown.text
    results = list[StepResult]()
    for guess in guesses:
        results.append(await world.step(guess))
        if results[-1].done:
            break
    return results


async def test_guesses_are_told_where_the_number_is() -> None:
    task = first(GuessTasks(0))
    number = json.loads(task.payload)["number"]
    guesses = [f"Is it {number - 1}?", "let me think", str(number + 1), str(number)]
    results = await play(GuessNumber(), task, guesses)
    assert [hint for result in results for hint in said(result)] == [
        "higher",
        f"Say a number from {json.loads(task.payload)['low']} to "
        f"{json.loads(task.payload)['high']}.",
        "lower",
    ]
    assert [result.reward for result in results] == [0.0, 0.0, 0.0, 1.0]
    assert [result.done for result in results] == [False, False, False, True]


@pytest.mark.parametrize(("scoring", "worth"), [("found", 1.0), ("guesses", 0.6)])
async def test_a_late_guess_may_be_worth_less(scoring: Any, worth: float) -> None:
    task = first(GuessTasks(0))
    number = json.loads(task.payload)["number"]
    world = GuessNumber(scoring=scoring)
    guesses = [str(number + 1), str(number + 2), str(number)]
    assert (await play(world, task, guesses))[-1].reward == pytest.approx(worth)
    results = await play(world, task, [str(number + 1)] * 9)
    assert len(results) == 5
    assert results[-1].reward == 0.0


async def test_halving_finds_every_number_in_five_guesses() -> None:
    tasks, found = GuessTasks(0, split="heldout"), 0.0
    for position in range(100):
        payload, world = json.loads(tasks[position].payload), GuessNumber()
        await world.reset(tasks[position], 0)
        low, high, done = payload["low"], payload["high"], False
        while not done:
            guess = (low + high) // 2
            result = await world.step(str(guess))
            done, found = result.done, found + result.reward
            if said(result) == ["higher"]:
                low = guess + 1
            else:
                high = guess - 1
    assert found == 100


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("tools", {"tool_parser": "xml"}, "o.tool_parser: Input should be 'hermes', 'llama3_json'"),
        ("tools", {"tools": ["browser"]}, "o.tools.0: Input should be 'calculator', 'search' or"),
        ("tools", {"max_turns": 0}, "o.max_turns: Input should be greater than or equal to 1"),
        ("tools", {"corpus": "/etc"}, "o.corpus: unknown option of 'tools'; allowed: kinds, max"),
        ("guess_number", {"span": 1}, "o.span: Input should be greater than or equal to 2"),
        ("guess_number", {"scoring": "x"}, "o.scoring: Input should be 'found' or 'guesses'"),
    ],
)
def test_wrong_options_are_refused_at_submit(name: str, options: dict[str, Any], told: str) -> None:
    (line,) = wrong_options("o", "environments", name, options)
    assert line.startswith(told)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ToolTasks(tools=["search"], kinds=["recall"]), "kinds: .*allowed: look_up"),
        (lambda: ToolTasks(tools=["search", "search"]), "tools: .* each once"),
        (lambda: ToolTasks(kinds=[]), "kinds"),
        (lambda: GuessTasks(span=200), "span: 200; with most 99 allowed: 2 to 100"),
        (lambda: GuessTasks(span=2, most=2), "span: 2; .*at least 10 pairs"),
        (lambda: GuessNumber(max_turns=65), "max_turns: 65; allowed: 1 to 64"),
    ],
)
def test_options_that_do_not_fit_each_other_are_named(make: Any, told: str) -> None:
    with pytest.raises(InvalidError, match=rf"tasks\.options\.{told}"):
        make()
