"""Reads what a server of chat completions answers; a server is not trusted to keep to the form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from paceline.environments.tool_calls import MAX_CALLS
from paceline.errors import PacelineError
from paceline.platform.text import clipped, encodable
from paceline.platform.transport.endpoints import RefusedError
from paceline.types import Reply
from paceline_environment.outside.history import ChatMessage, action_of

LENGTH, FILTERED = "length", "content_filter"
_MAX_NAME = 256
_MAX_TOKENS = (1 << 31) - 1
_FILTER_CODES = ("content_filter", "content_policy_violation", "ResponsibleAIPolicyViolation")
_FULL = ("context_length_exceeded", "context length", "context window")


class NoCompletionError(PacelineError):
    """An answer is no chat completion."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A turn, and the message with which it stands in the dialogue."""

    reply: Reply
    message: ChatMessage


def read_turn(answer: Mapping[str, Any]) -> ChatTurn:
    """The first choice of an answer.

    Raises:
        NoCompletionError: it has none, or in another form.
    """
    choice = _first(answer)
    message = _object(choice.get("message"), "choices[0].message")
    content = encodable(_text(message.get("content")) or _text(message.get("refusal")))
    shown: ChatMessage = {"role": "assistant", "content": content}
    calls = [_call(call, number) for number, call in enumerate(_list(message.get("tool_calls")))]
    if calls:
        shown["tool_calls"] = calls
    functions = [call["function"] for call in calls]
    usage = answer.get("usage")
    usage = cast("dict[str, Any]", usage) if isinstance(usage, dict) else {}
    reply = Reply(
        text=action_of(
            content, [(function["name"], function["arguments"]) for function in functions]
        ),
        model=_name(answer.get("model")),
        finish_reason=_name(choice.get("finish_reason")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
    )
    return ChatTurn(reply, shown)


def filtered(error: RefusedError) -> ChatTurn | None:
    """The empty turn of a model whose server has refused to let it answer; None: otherwise."""
    if error.code not in _FILTER_CODES:
        return None
    return ChatTurn(Reply("", finish_reason=FILTERED), {"role": "assistant", "content": ""})


def is_full(error: RefusedError) -> bool:
    """Whether a server says that the dialogue is longer than the model's context."""
    refusal = f"{error.code} {error.message}".casefold()
    return any(phrase in refusal for phrase in _FULL)


def _first(answer: Mapping[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        names = ", ".join(sorted(map(str, answer))[:8]) or "none"
        raise NoCompletionError(f"no choices; fields: {clipped(names, _MAX_NAME)}")
    return _object(cast("list[Any]", choices)[0], "choices[0]")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoCompletionError(f"{what} is no object")
    return cast("dict[str, Any]", value)


def _list(value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise NoCompletionError("tool_calls is no list")
    return cast("list[Any]", value or [])[:MAX_CALLS]


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise NoCompletionError("the content of the message is no text")
    return value or ""


def _call(value: Any, number: int) -> ChatMessage:
    call = _object(value, "a call of a tool")
    function = _object(call.get("function"), "the function of a call")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str | None):
        raise NoCompletionError("a call of a tool has no name, or arguments that are no text")
    return {
        "id": _name(call.get("id")) or f"call_{number}",
        "type": "function",
        "function": {"name": _name(name), "arguments": encodable(arguments or "{}")},
    }


def _name(value: Any) -> str:
    return clipped(value, _MAX_NAME) if isinstance(value, str) else ""


def _count(value: Any) -> int:
    """A number of tokens; -1: it is none."""
    return value if type(value) is int and 0 <= value <= _MAX_TOKENS else -1
