"""How a row of data becomes the payload of a task: columns, a template, or messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, cast

from pydantic import Field

from paceline.data.errors import RowError
from paceline.data.messages import check_shown, message_of, messages_in, quoted, tools_of
from paceline.platform.digest import number
from paceline.plugins import StrictModel

MAX_PROMPT_CHARS = 1 << 22  # of a filled template
PROMPTS = ("question", "prompt", "messages")
"""Columns that may hold what the policy is asked, in this order."""
_FIELD = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_][\w.]*)\}")
_OTHER_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_LISTED = 20  # columns in a message
_QUOTED = 60  # characters of a value in a message
Template = Annotated[str, Field(max_length=32_768)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_]\w*$")]

Columns = Annotated[dict[Name, Annotated[str, Field(max_length=1024)]], Field(max_length=256)]


class RowShape(StrictModel):
    """Names for columns, and the prompt that is made of them."""

    columns: Columns = Field(default_factory=dict[str, str])
    """Column by name; `meta.level` and `answers.0` are parts of a column. Without any, a task has
    all columns of its row under their own names."""
    template: Template = ""
    """The question, with `{name}` for columns; `{{name}}` is not replaced."""

    def top_columns(self) -> list[str] | None:
        """Columns that have to be read, besides those that only look like one; None: all."""
        return list(self.columns.values()) or None

    def payload(self, row: Any) -> dict[str, Any]:
        """The payload of the task that a row is, with either a `question` or `messages`.

        Raises:
            RowError: a column is missing, or of a wrong type.
        """
        named = self._named(row)
        self._ask(named)
        return named

    def checked(self, row: Any) -> int:
        """As `payload`, but returns a 64-bit hash of what is asked.

        It is the same in files of any format and order. Rows that ask the same belong to the same
        split, whatever else they say. The text of a template plays no part, so that another wording
        leaves the split as it was.
        """
        asked = self._ask(self._named(row))
        return number("split", asked if isinstance(asked, str) else json.dumps(asked))

    def _ask(self, named: dict[str, Any]) -> Any:
        """Set `question` or `messages`; returns what is asked, without the words of a template."""
        name = next((each for each in PROMPTS if named.get(each) is not None), "")
        prompt = named[name] if name else None
        if isinstance(prompt, str):
            prompt = messages_in(prompt) or prompt
        if shown := next((each for each in _OTHER_MEDIA if named.get(each)), None):
            raise RowError(
                f"has {shown!r}, and only texts are shown to the policy; name the columns that "
                "are needed in `columns` to leave it out"
            )
        if self.template:
            values, filled = _filled(self.template, named)
            _take_question(named, filled)
            return prompt if isinstance(prompt, str) else values
        if isinstance(prompt, str) and (prompt.strip()):
            _take_question(named, prompt)
            return prompt
        if isinstance(prompt, list) and prompt:
            _take_messages(named, name, cast("list[Any]", prompt))
            return named["messages"]  # without the answer, which rows with one prompt may differ in
        raise _no_prompt(named, name)

    def _named(self, row: Any) -> dict[str, Any]:
        if isinstance(row, list):
            raise RowError("is a list; one object a line is needed (jq -c '.[]')")
        if not isinstance(row, Mapping):
            raise RowError(f"is not an object of columns but {quoted(row)}")
        found = cast("Mapping[str, Any]", row)
        if not self.columns:
            return dict(found)
        return {name: _at(found, column) for name, column in self.columns.items()}


def _at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a part of it."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = cast("Mapping[str, Any]", value)[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(cast("Any", value)):
            value = cast("list[Any]", value)[int(part)]
        else:
            listed = ", ".join(repr(name[:_QUOTED]) for name in [*row][:_LISTED]) or "none"
            raise RowError(f"has no column {column!r}; it has {listed}")
    return value


def _no_prompt(named: Mapping[str, Any], name: str) -> RowError:
    if name:
        text = f"{name!r} is {quoted(named[name])}; a text or a list of messages is needed"
        return RowError(text)
    listed = ", ".join(repr(name[:_QUOTED]) for name in [*named][:_LISTED]) or "none"
    return RowError(
        f"has none of the columns {', '.join(PROMPTS)}; it has {listed}; name one in `columns` "
        "(question: COLUMN) or write a `template`"
    )


def _take_question(named: dict[str, Any], text: str) -> None:
    """Set `question`. A column `messages` beside it may hold the dialogue with its answer."""
    named["question"] = text
    named.pop("messages", None)
    tools = named.get("tools")  # any other column may have that name too
    if isinstance(tools, list) or (isinstance(tools, str) and tools.lstrip().startswith("[")):
        named["tools"] = tools_of(cast("Any", tools))


def _take_messages(named: dict[str, Any], name: str, prompt: list[Any]) -> None:
    """Set `messages` and `tools`; what an assistant says last is no prompt, but may be the answer.

    A dialogue that ends with several messages of an assistant has the last one for an answer.
    """
    messages = [message_of(f"{name}.{at}", each) for at, each in enumerate(prompt)]
    last: dict[str, Any] | None = None
    while messages and messages[-1]["role"] == "assistant":
        last = last or messages[-1]
        messages.pop()
    if all(each["role"] != "user" for each in messages):
        roles = ", ".join(sorted({each["role"] for each in messages} or {"assistant"}))
        raise RowError(f"{name!r} has only messages of: {roles}; one of a user is needed")
    for at, message in enumerate(messages):
        check_shown(f"{name}.{at}", prompt[at], message)
    tools = tools_of(named.pop("tools", None))
    named.pop(name)
    named.pop("question", None)  # null
    named["messages"] = messages
    if tools:
        named["tools"] = tools
    if last is not None and named.get("answer") is None:
        named.update(_answer(f"{name}.{len(prompt) - 1}", last))


def _answer(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    """The answer that an assistant's last message is."""
    if message["content"]:
        return {"answer": message["content"]}
    if "tool_calls" in message:
        raise RowError(
            f"{where} ends the dialogue with calls of tools, which are no text to compare with; "
            "add a column `answer`, or leave that message out"
        )
    return {}


@cache
def _pieces(template: str) -> tuple[tuple[str, str], ...]:
    """A template as pairs of a text and the field that follows it; empty: none."""
    pieces, text, at = list[tuple[str, str]](), "", 0
    for found in _FIELD.finditer(template):
        text += template[at : found.start()]
        at = found.end()
        if found[1]:
            text += "{" + found[1] + "}"
        else:
            pieces.append((text, found[2]))
            text = ""
    return (*pieces, (text + template[at:], ""))


def fields_of(template: str) -> set[str]:
    """The columns that a template names."""
    return {field for _, field in _pieces(template) if field}


def _filled(template: str, named: Mapping[str, Any]) -> tuple[list[str], str]:
    """The values of a template's fields, and the template with them.

    No expressions and no code: a template of a user is filled in by services of everybody.
    """
    pieces = _pieces(template)
    values = [_text(field, _at(named, field)) for _, field in pieces if field]
    if (size := len(template) + sum(map(len, values))) > MAX_PROMPT_CHARS:
        raise RowError(f"makes a prompt of {size} characters; at most {MAX_PROMPT_CHARS}")
    filled = "".join(text + value for (text, _), value in zip(pieces, [*values, ""], strict=True))
    return values, filled


def _text(field: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise RowError(f"{field!r} is null; the template needs it")
    return json.dumps(value, ensure_ascii=False)
