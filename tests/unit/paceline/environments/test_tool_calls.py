"""Calls of tools in the texts of models, and what a policy is told about bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from paceline.environments.tool_calls import (
    MAX_CALLS,
    BadCall,
    Calls,
    ToolCall,
    hermes,
    llama3_json,
    pythonic,
    tool_parser,
)
from paceline.environments.toolbox import Toolbox
from paceline.errors import InvalidError
from paceline.plugins import Message


def in_hermes(calls: list[ToolCall]) -> str:
    bodies = [json.dumps({"name": c.name, "arguments": c.arguments}) for c in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def in_llama3_json(calls: list[ToolCall]) -> str:
    return "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls)


def in_pythonic(calls: list[ToolCall]) -> str:
    def said(call: ToolCall) -> str:
        return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"

    return f"[{', '.join(map(said, calls))}]"


FORMATS = [(hermes, in_hermes), (llama3_json, in_llama3_json), (pythonic, in_pythonic)]
PARSERS = [parser for parser, _ in FORMATS]
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[f(",
    ")]",
    "{",
    "}",
    '"name"',
    ": ",
    ";",
]
NAMES = st.sampled_from(["search", "write_note", "f2"])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(MARKS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(TEXTS, each, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.lists(
    st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3
)


@pytest.mark.parametrize("parse", PARSERS)
@given(text=st.text() | st.lists(st.sampled_from(MARKS) | st.text(max_size=5)).map("".join))
def test_no_text_breaks_a_parser(parse: Callable[[str], Calls], text: str) -> None:
    for call in parse(text):
        assert isinstance(call, ToolCall | BadCall)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        "[f(a=" + "-" * 15_000 + "1)]",
        "[f(a=" + "1+" * 9_000 + "1)]",
        "[f(a=" + "(" * 15_000 + ")]",
        "[f(a=1e999)]",
        "[f(a={1, 2})]",
        "[f(a='\\ud800')]",
        "[f(a=b)]",
        "[f(1)]",
        "[f(a=1), 2]",
    ],
    ids=lambda body: body[:24],
)
def test_hostile_calls_are_bad_calls(parse: Callable[[str], Calls], body: str) -> None:
    text = f"<tool_call>{body}" if parse is hermes else body
    assert not any(isinstance(call, ToolCall) and call.arguments for call in parse(text)[-1:])


@pytest.mark.parametrize(("parse", "write"), FORMATS)
@given(calls=CALLS)
def test_calls_are_read_as_they_were_written(
    parse: Callable[[str], Calls], write: Callable[[list[ToolCall]], str], calls: list[ToolCall]
) -> None:
    assert list(parse(write(calls))) == calls


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (hermes, "It is 4."),
        (hermes, '{"name": "f", "arguments": {}}'),
        (llama3_json, "It is 4; or 5"),
        (pythonic, "[4, 5]"),
        (pythonic, "It is [4]"),
    ],
)
def test_a_plain_answer_has_no_calls(parse: Callable[[str], Calls], text: str) -> None:
    assert parse(text) == ()


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (hermes, "<tool_call>{", "is not JSON: Expecting property name"),
        (
            hermes,
            '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
            "</tool_call> is missing",
        ),
        (hermes, '<tool_call>{"arguments": {}}</tool_call>', "has no `name`"),
        (hermes, '<tool_call>{"name": "f"}</tool_call>', "has no `arguments`"),
        (llama3_json, '{"name": "f", "parameters": {}} and', "there is text after the JSON"),
        (llama3_json, '<|python_tag|>{"name": "f"}', "has no `arguments`"),
        (pythonic, "[f(a=1)", "is no Python list of calls"),
        (pythonic, "[f(1)]", "has an argument without a name"),
        (pythonic, "[f(a=g())]", "has an argument that is no literal"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(
    parse: Callable[[str], Calls], text: str, problem: str
) -> None:
    (call,) = parse(text)
    assert isinstance(call, BadCall)
    assert problem in call.problem


def test_a_turn_may_think_first_and_end_within_the_last_tag() -> None:
    said = (
        'Two calls. <tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call> and '
    )
    calls = hermes(said + '<tool_call>\n{"name": "g", "arguments": {}}\n')
    assert calls == (ToolCall("f", {"a": "</tool_call>"}), ToolCall("g", {}))


def test_an_unknown_parser_is_named() -> None:
    assert tool_parser("hermes") is hermes
    with pytest.raises(InvalidError, match="tool_parser: 'xml'; allowed: hermes, llama3_json"):
        tool_parser("xml")


class Shop:
    def __init__(self) -> None:
        self.sold = 0

    def sell(self, item: str, number: Annotated[int, Field(ge=1)] = 1, schema: bool = False) -> str:
        """Sell some of an item.

        What follows is not for the policy.
        """
        if item == "nothing":
            raise ValueError("there is none")
        self.sold += number
        return f"{number} {item}{schema or ''}"


def test_a_toolbox_describes_functions() -> None:
    (schema,) = Toolbox([Shop().sell]).schemas
    assert schema == {
        "type": "function",
        "function": {
            "name": "sell",
            "description": "Sell some of an item.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "number": {"type": "integer", "minimum": 1, "default": 1},
                    "schema": {"type": "boolean", "default": False},
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }


def calls_of(*calls: tuple[str, dict[str, Any]]) -> str:
    return in_hermes([ToolCall(name, arguments) for name, arguments in calls])


def test_a_toolbox_answers_calls_in_order() -> None:
    shop, other = Shop(), Shop()
    boxes = Toolbox([shop.sell]), Toolbox([other.sell])
    turn = calls_of(("sell", {"item": "tea", "number": 2}), ("sell", {"item": "jam"}))
    expected = (Message("tool", "2 tea", name="sell"), Message("tool", "1 jam", name="sell"))
    assert boxes[0].answers(turn) == expected
    assert (shop.sold, other.sold) == (3, 0)
    assert boxes[0].answers("Done.") == ()


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ("<tool_call>tea", "error: the call is not JSON"),
        (calls_of(("steal", {})), "error: no tool 'steal'; allowed: sell"),
        (calls_of(("sell", {})), "error: item: Field required"),
        (
            calls_of(("sell", {"item": "tea", "number": 0})),
            "error: number: Input should be greater",
        ),
        (calls_of(("sell", {"item": "tea", "colour": 1})), "error: colour: Extra inputs"),
        (calls_of(("sell", {"item": "nothing"})), "error: there is none"),
    ],
)
def test_a_bad_call_is_answered_with_what_is_wrong(turn: str, told: str) -> None:
    (answer,) = Toolbox([Shop().sell]).answers(turn)
    assert answer.role == "tool"
    assert answer.content.startswith(told)


@pytest.mark.parametrize(
    "text", ["<tool_call>" * 100_000, '{"name": "f", "parameters": {}};' * 50_000]
)
def test_a_turn_that_repeats_itself_is_read_at_once(text: str) -> None:
    for name in ("hermes", "llama3_json", "pythonic"):
        assert len(tool_parser(name)(text)) <= MAX_CALLS
