"""A strict server of chat completions: it refuses what OpenAI's does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from paceline_harness.servers.chat import Reply

Body = dict[str, Any]
_FIELDS = {
    *("model", "messages", "tools", "temperature", "top_p", "max_tokens", "stop", "seed"),
    "max_completion_tokens",
}
_OF_ROLES = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}


def completion(text: str, *, calls: list[Body] | None = None, **choice: Any) -> Reply:
    """An answer with one choice; `usage` counts characters."""
    message: Body = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = calls
    usage = {"prompt_tokens": 5, "completion_tokens": len(text)}
    reason = "tool_calls" if calls else "stop"
    body = {
        "model": "served-2026",
        "choices": [{"index": 0, "message": message, "finish_reason": reason, **choice}],
        "usage": usage,
    }
    return 200, json.dumps(body).encode()


def refusal(status: int, message: str, *, code: str | None = None, **headers: str) -> Reply:
    """An error as OpenAI's server words it."""
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return status, json.dumps({"error": error}).encode(), headers


def strict(answer: Callable[[Body], Reply], *, model: str) -> Callable[[Body], Reply]:
    """`answer`, for requests that are in order; others are refused with 400."""

    def checked(body: Body) -> Reply:
        problem = _problem(body, model)
        return refusal(400, problem) if problem else answer(body)

    return checked


def _problem(body: Body, model: str) -> str:
    if unknown := sorted(set(body) - _FIELDS):
        return f"Unrecognized request argument supplied: {unknown[0]}"
    if body.get("model") != model:
        return f"The model {body.get('model')!r} does not exist"
    if not body.get("messages"):
        return "messages is empty"
    open_calls: list[str] = []
    for index, message in enumerate(body["messages"]):
        allowed = _OF_ROLES.get(message.get("role"), set[str]())
        if not {"role", "content"} <= set(message) <= allowed:
            return f"messages[{index}] has the fields {sorted(message)}"
        if not isinstance(message["content"], str):
            return f"messages[{index}].content is not text"
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                return f"messages[{index}]: tool without a preceding call"
            open_calls.remove(message["tool_call_id"])
        elif open_calls:
            return f"messages[{index}]: calls without answers: {open_calls}"
        for call in message.get("tool_calls", ()):
            if not isinstance(call["function"]["arguments"], str):
                return f"messages[{index}]: arguments are not text"
            open_calls.append(call["id"])
    return "calls without answers" if open_calls else ""
