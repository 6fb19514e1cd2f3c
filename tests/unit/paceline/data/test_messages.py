"""Dialogues of rows: calls of tools, offered tools, and what an assistant says last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import RowError, RowShape
from paceline.data.messages import message_of
from paceline.environments.dataset.world import observation_of
from paceline_harness.data import InProcess

USER: dict[str, Any] = {"role": "user", "content": "weather in Oslo?"}
CALL: dict[str, Any] = {
    "type": "function",
    "id": "c1",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
CALLING: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
HEARD: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "snow"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
SEEN = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TEXTS = st.text(max_size=8)
VALUES = st.none() | st.integers() | TEXTS | st.lists(st.none() | TEXTS, max_size=2)
ANYTHING = st.recursive(
    VALUES, lambda each: st.lists(each, max_size=2) | st.dictionaries(TEXTS, each, max_size=2)
)


@pytest.mark.parametrize("content", [None, "", "I look."])
def test_a_dialogue_with_calls_of_tools_is_shown_whole(content: str | None) -> None:
    row = {"messages": [USER, {**CALLING, "content": content}, HEARD], "answer": "snow"}
    seen = observation_of(RowShape().payload({**row, "tools": [TOOL]}))
    user, calling, heard = seen.messages
    assert user.content == USER["content"]
    assert (calling.content, calling.tool_calls) == (content or "", ({"id": "c1", **SEEN},))
    assert (heard.content, heard.name, heard.tool_call_id) == ("snow", "weather", "c1")
    assert seen.tools == (TOOL,)
    assert RowShape().checked(row) != RowShape().checked({**row, "messages": [USER, HEARD]})


@pytest.mark.parametrize(
    "call",
    [
        {**CALL, "id": None},
        {"function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"name": "weather", "arguments": '{"city": "Oslo"}'},
    ],
)
def test_calls_are_shown_as_templates_want_them(call: dict[str, Any]) -> None:
    assert message_of("m.0", {**CALLING, "tool_calls": [call]})["tool_calls"] == [SEEN]


@pytest.mark.parametrize("tools", [None, [], [TOOL], json.dumps([TOOL])])
def test_tools_are_offered_in_either_form(tools: Any) -> None:
    found = RowShape().payload({"messages": [USER], "tools": tools}).get("tools", [])
    assert found == ([TOOL] if tools else [])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({**CALLING, "tool_calls": None}, r"messages\.1\.content is None; a text is needed"),
        ({**CALLING, "tool_calls": "f()"}, r"messages\.1\.tool_calls is 'f\(\)'; a list of"),
        ({**CALLING, "role": "user"}, r"messages\.1\.tool_calls: a message of 'user' has some"),
        ({**CALLING, "tool_calls": [{"id": "c"}]}, r"messages\.1\.tool_calls\.0 .* no function"),
        (
            {**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": "city=Oslo"}}]},
            r"tool_calls\.0\.function\.arguments is 'city=Oslo'; an object is needed",
        ),
        ({"role": "assistant", "function_call": {"name": "f"}}, r"function_call is of an older"),
        ({**HEARD, "tool_call_id": 7}, r"messages\.1\.tool_call_id is 7; a text is needed"),
    ],
)
def test_what_cannot_be_shown_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RowError, match=says):
        RowShape().payload({"messages": [USER, wrong, USER]})


def test_tools_that_are_none_are_refused() -> None:
    for tools in ("hammer", 7, [{"name": "f"}], {"a": TOOL}):
        with pytest.raises(RowError, match="tools"):
            RowShape().payload({"messages": [USER], "tools": tools})
    assert RowShape().payload({"question": "?", "tools": "hammer"})["tools"] == "hammer"


def test_the_last_message_of_an_assistant_is_the_answer() -> None:
    said = [{"role": "assistant", "content": each} for each in ("step", "2")]
    assert RowShape().payload({"messages": [USER, *said]}) == {"messages": [USER], "answer": "2"}
    given_too = RowShape().payload({"messages": [USER, *said], "answer": "3"})
    assert given_too == {"messages": [USER], "answer": "3"}
    with pytest.raises(RowError, match=r"messages\.1 ends the dialogue with calls of tools"):
        RowShape().payload({"messages": [USER, CALLING]})
    assert RowShape().payload({"messages": [USER, CALLING], "answer": "3"})["answer"] == "3"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool"]) | ANYTHING,
            "content": ANYTHING,
            "name": ANYTHING,
            "tool_call_id": ANYTHING,
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {}, optional={"function": ANYTHING, "name": ANYTHING, "arguments": ANYTHING}
                ),
                max_size=2,
            )
            | ANYTHING,
        },
    )
)
def test_any_message_is_shown_or_refused(raw: dict[str, Any]) -> None:
    try:
        made = message_of("m.0", raw)
    except RowError:
        return
    assert json.loads(json.dumps(made)) == made
    assert message_of("m.0", made) == made
    assert len(made.get("tool_calls", [])) == len(raw.get("tool_calls") or [])


def test_missing_values_of_pandas_are_null_and_others_name_their_column(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "question": ["1+1=", "1+2="],
        "answer": ["2", "3"],
        "score": [0.5, float("nan")],
        "more": [[1.0], [float("nan"), 2.0]],
    }
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "rows.parquet"
    parquet.write_table(arrow.table(columns), path)
    data = InProcess(uploaded=str(tmp_path / "data"), cache=str(tmp_path / "cache"))
    rows = data.rows("", RowShape())
    assert [rows[at]["score"] for at in range(2)] == [0.5, None]
    assert rows[1]["more"] == [None, 2.0]
    parquet.write_table(arrow.table({**columns, "score": [0.5, float("inf")]}), path)
    with pytest.raises(Exception, match=r"rows\.parquet: row 1: column 'score' .*`columns`"):
        data.rows("", RowShape())
    named = RowShape(columns={"question": "question", "answer": "answer"})
    assert len(data.rows("", named)) == 2


UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "a list as Python writes it": ({"prompt": str([USER])}, "as Python writes it"),
    "an empty message": ({"messages": [{**USER, "content": " "}]}, "messages.0.content"),
    "no part of text": ({"messages": [{**USER, "content": []}]}, "messages.0.content"),
    "an image with a text": (
        {"messages": [{**USER, "content": [{"type": "image", "text": ""}]}]},
        "only parts of text",
    ),
    "a column of images": ({"prompt": "<image>?", "images": ["a.png"]}, "'images'"),
    "reasoning": (
        {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, USER]},
        "messages.1.reasoning_content",
    ),
    "tools of a message": ({"messages": [{**USER, "tools": [TOOL]}]}, "messages.0.tools"),
    "nobody asks": ({"messages": [{"role": "system", "content": "s"}]}, "one of a user is needed"),
}


@pytest.mark.parametrize("title", UNREAD)
def test_what_the_policy_would_not_be_shown_is_refused(title: str) -> None:
    row, text = UNREAD[title]
    with pytest.raises(RowError, match=text):
        RowShape().payload(row)


@pytest.mark.parametrize("name", ["messages", "prompt", "question"])
def test_messages_may_be_json_text(name: str) -> None:
    said = [{"role": "system", "content": "s"}, USER]
    written = RowShape().payload({name: json.dumps(said), "answer": "a"})
    assert written == RowShape().payload({name: said, "answer": "a"})
    assert len(observation_of(written).messages) == 2
    other = RowShape().payload({name: '[{"name": "a list of the question"}]'})
    assert "messages" not in other


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_are_offered_with_a_question_too(tools: Any) -> None:
    seen = observation_of(RowShape().payload({"question": "weather in Oslo?", "tools": tools}))
    assert seen.tools == (TOOL,)


def test_what_is_only_in_the_answer_is_no_part_of_the_prompt() -> None:
    last = {"role": "assistant", "content": "snow", "reasoning_content": "cold"}
    payload = RowShape().payload({"messages": [USER, last], "answer": None})
    assert (payload["messages"], payload["answer"]) == ([USER], "snow")
