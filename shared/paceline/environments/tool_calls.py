"""Calls of tools in the text of a turn, in the formats in which models write them.

Parsers have the names that vLLM and SGLang give to theirs, and read the same calls. None of them
raises, whatever the text: what looks like a call and is none becomes a `BadCall`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from paceline.errors import InvalidError

MAX_PYTHONIC_CHARS = 20_000  # Python's own parser needs much memory for long texts
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BLANK = re.compile(r"\s*")
_AFTER_HERMES = re.compile(rf"\s*(?:{_CLOSE}|\Z)")
_AFTER_LLAMA = re.compile(r"\s*(?:;\s*|\Z)")
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_]\w*\s*\(")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by name, with its arguments as JSON values."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that cannot be read; the policy is told the `problem`."""

    problem: str


MAX_CALLS = 16  # of one turn that get answers
Calls = tuple[ToolCall | BadCall, ...]
Parser = Callable[[str], Calls]
ParserName = Literal["hermes", "llama3_json", "pythonic"]


def tool_parser(name: str) -> Parser:
    """The parser of this name.

    Raises:
        InvalidError: there is none.
    """
    if name not in _PARSERS:
        raise InvalidError(f"tasks.options.tool_parser: {name!r}; allowed: {', '.join(_PARSERS)}")
    return _PARSERS[name]


def hermes(text: str) -> Calls:
    """Calls as Hermes, Qwen2.5 and Qwen3 write them: JSON objects in `<tool_call>` tags.

    The closing tag may be missing at the end of the text. Those beyond `MAX_CALLS` are not read.
    """
    calls: list[ToolCall | BadCall] = []
    start = text.find(_OPEN)
    while start >= 0 and len(calls) < MAX_CALLS:
        call, end = _json_call(text, start + len(_OPEN), _AFTER_HERMES, f"{_CLOSE} is missing")
        calls.append(call)
        start = text.find(_OPEN, end)
    return tuple(calls)


def llama3_json(text: str) -> Calls:
    """Calls as Llama 3.1 and 3.2 write them: the whole turn is JSON, several calls with `;`."""
    text = text.strip().removeprefix(_PYTHON_TAG).strip()
    calls: list[ToolCall | BadCall] = []
    at = 0
    while at < len(text) and len(calls) < MAX_CALLS and (calls or text.startswith("{")):
        call, at = _json_call(text, at, _AFTER_LLAMA, "there is text after the JSON")
        calls.append(call)
        if isinstance(call, BadCall):
            break
    return tuple(calls)


def pythonic(text: str) -> Calls:
    """Calls as Llama 3.2, Llama 4 and ToolACE write them: a Python list of calls with keywords."""
    text = text.strip()
    if not _PYTHONIC.match(text):
        return ()
    if len(text) > MAX_PYTHONIC_CHARS:
        return (BadCall(f"has more than {MAX_PYTHONIC_CHARS} characters"),)
    try:
        listed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (BadCall("is no Python list of calls"),)
    if not isinstance(listed, ast.List):
        return (BadCall("is no Python list of calls"),)
    return tuple(map(_python_call, listed.elts))


def _json_call(
    text: str, start: int, after: re.Pattern[str], otherwise: str
) -> tuple[ToolCall | BadCall, int]:
    """The call that begins at a place, and where reading goes on."""
    start = _space_end(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return BadCall(f"is not JSON: {error.msg}"), start
    except (ValueError, RecursionError):  # a huge number, NaN, too many brackets
        return BadCall("is not JSON"), start
    ended = after.match(text, end)
    if ended is None:
        return BadCall(otherwise), end
    if not isinstance(value, dict):
        return BadCall("is no JSON object"), ended.end()
    arguments = value.get("arguments", value.get("parameters"))
    return _checked(value.get("name"), arguments), ended.end()


def _space_end(text: str, start: int) -> int:
    match = _BLANK.match(text, start)
    return match.end() if match else start


def _python_call(node: ast.expr) -> ToolCall | BadCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return BadCall("has an item that is no call of a function")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return BadCall("has an argument without a name")
    try:
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError):
        return BadCall("has an argument that is no literal")
    return _checked(node.func.id, values)


def _checked(name: Any, arguments: Any) -> ToolCall | BadCall:
    """A call whose arguments are JSON, and can be sent on as text."""
    if not isinstance(name, str) or not name:
        return BadCall("has no `name`")
    if not isinstance(arguments, dict):
        return BadCall("has no `arguments`, which are an object")
    try:
        text = json.dumps([name, arguments], allow_nan=False, ensure_ascii=False)
        text.encode()  # no half of a surrogate pair
        return ToolCall(*json.loads(text))
    except (TypeError, ValueError, RecursionError):
        return BadCall("has arguments that are not JSON")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
_PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
}
