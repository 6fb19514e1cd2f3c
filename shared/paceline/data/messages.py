"""Messages and tools of a row, from the form of OpenAI's API to the one of chat templates.

Templates want the arguments of a call as an object; the API has them as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from paceline.data.errors import RowError

ROLES = ("system", "user", "assistant", "tool")
# Of what templates of some models show, and no message of ours has.
_UNKNOWN = ("reasoning_content", "reasoning", "thinking", "audio", "refusal", "tools", "images")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_QUOTED = 60  # characters of a value in a message
_CALL = "{function: {name, arguments}}"
_TOOL = "{type: function, function: {name, description, parameters}}"


def message_of(where: str, raw: Any) -> dict[str, Any]:
    """A message with `role`, `content` and, if it has them, `name`, `tool_call_id`, `tool_calls`.

    Raises:
        RowError: names the field below `where` that is missing, or of a wrong type.
    """
    message = _mapping(raw)
    if message is None:
        raise RowError(f"{where} is {quoted(raw)}; role and content are needed")
    role = message.get("role")
    if role not in ROLES:
        raise RowError(f"{where}.role is {quoted(role)}; allowed: {', '.join(ROLES)}")
    if message.get("function_call"):
        raise RowError(f"{where}.function_call is of an older API; `tool_calls` are needed")
    calls = _calls(where, role, message.get("tool_calls"))
    content = _content(where, message.get("content"), may_be_null=bool(calls))
    made: dict[str, Any] = {"role": role, "content": content}
    for key in ("name", "tool_call_id"):
        if value := message.get(key):
            made[key] = _text(f"{where}.{key}", value)
    return {**made, "tool_calls": calls} if calls else made


def check_shown(where: str, raw: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    """Refuse a message of a prompt that lacks something of its row's, or says nothing.

    Raises:
        RowError: names the field below `where`.
    """
    if unknown := next((key for key in _UNKNOWN if raw.get(key)), None):
        raise RowError(
            f"{where}.{unknown} is not shown to the policy; remove it, or put its text into content"
        )
    if message["role"] == "user" and not message["content"].strip():
        raise RowError(f"{where}.content of the user is empty; a text is needed")


def tools_of(raw: Any) -> list[dict[str, Any]]:
    """The functions that a column `tools` offers; none if it is null or empty.

    Raises:
        RowError: it is no list of functions, nor JSON text of one.
    """
    if not raw:
        return []
    listed = _json(raw) if isinstance(raw, str) else raw
    if not isinstance(listed, list):
        raise RowError(
            f"'tools' is {quoted(raw)}; a list of {_TOOL} is needed; name the columns that are "
            "needed in `columns` to leave it out"
        )
    return [_tool(f"tools.{at}", each) for at, each in enumerate(cast("list[Any]", listed))]


def messages_in(text: str) -> list[Any] | None:
    """The messages that a text is, as some files have them; None if it is a text.

    Raises:
        RowError: it is a list of messages as Python writes it.
    """
    start = text[:20].replace(" ", "").replace("\n", "")
    if start.startswith("[{'"):
        raise RowError(
            "has a prompt that is a list as Python writes it, not a text; write it as JSON "
            "(json.dumps, not str)"
        )
    found = _json(text) if start.startswith('[{"') else None
    is_dialogue = isinstance(found, list) and all(
        (_mapping(each) or {}).get("role") in ROLES for each in cast("list[Any]", found)
    )
    return cast("list[Any]", found) if is_dialogue else None


def quoted(value: Any) -> str:
    """A value as messages show it: of lists and objects their type only."""
    text = repr(value) if not isinstance(value, (dict, list)) else type(cast("Any", value)).__name__
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


def _content(where: str, content: Any, *, may_be_null: bool) -> str:
    if content is None and may_be_null:
        return ""
    if isinstance(content, list):
        return "".join(_part(where, each) for each in cast("list[Any]", content))
    return _text(f"{where}.content", content)


def _part(where: str, raw: Any) -> str:
    """The text of a part of a message."""
    part = _mapping(raw) or {}
    text = part.get("text")
    if not isinstance(text, str) or part.get("type") not in _TEXT_PARTS:
        raise RowError(f"{where}.content has {quoted(raw)}; only parts of text are allowed")
    return text


def _calls(where: str, role: str, raw: Any) -> list[dict[str, Any]]:
    if not raw:
        return []
    if not isinstance(raw, list):
        raise RowError(f"{where}.tool_calls is {quoted(raw)}; a list of {_CALL} is needed")
    if role != "assistant":
        raise RowError(f"{where}.tool_calls: a message of {role!r} has some; allowed: assistant")
    calls = cast("Sequence[Any]", raw)
    return [_call(f"{where}.tool_calls.{at}", each) for at, each in enumerate(calls)]


def _call(where: str, raw: Any) -> dict[str, Any]:
    """A call; the function's name and arguments may be at its top, as some data sets have them."""
    call = _mapping(raw) or {}
    function = _mapping(call.get("function")) or call
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"{where} is {quoted(raw)}, which names no function; {_CALL} is needed")
    arguments = function.get("arguments")
    found = _json(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    if not isinstance(found, Mapping):
        raise RowError(
            f"{where}.function.arguments is {quoted(arguments)}; an object is needed, or its JSON"
        )
    made = {"type": "function", "function": {"name": name, "arguments": dict(found)}}
    identity = call.get("id")
    return {"id": _text(f"{where}.id", identity), **made} if identity else made


def _tool(where: str, raw: Any) -> dict[str, Any]:
    tool = _mapping(raw) or {}
    function = _mapping(tool.get("function")) or {}
    if tool.get("type") != "function" or not isinstance(function.get("name"), str):
        raise RowError(f"{where} is {quoted(raw)}; {_TOOL} is needed")
    return dict(tool)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowError(f"{where} is {quoted(value)}; a text is needed")
    return value


def _json(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None
