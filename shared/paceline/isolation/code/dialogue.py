"""Messages and observations of a dialogue as JSON, between a service and a job's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.plugins import Message, Observation


def message_fields(message: Message) -> list[Any]:
    """A message of a dialogue as JSON: its texts in their order, and its calls of tools."""
    calls = [dict(call) for call in message.tool_calls]
    return [message.role, message.content, message.name, message.tool_call_id, calls]


def observation_fields(value: Observation) -> dict[str, Any]:
    """An observation as JSON."""
    return {
        "messages": [message_fields(message) for message in value.messages],
        "text": value.text,
        "tools": [dict(tool) for tool in value.tools],
    }


def observation_of(raw: Mapping[str, Any]) -> Observation:
    """An observation of `observation_fields`; raises TypeError, ValueError or KeyError."""
    tools = tuple(dict(tool) for tool in raw["tools"])
    return Observation(messages=messages_of(raw["messages"]), text=str(raw["text"]), tools=tools)


def messages_of(raw: Any) -> tuple[Message, ...]:
    """Messages of `message_fields`; raises TypeError or ValueError."""
    return tuple(
        Message(*map(str, fields), tool_calls=tuple(dict(call) for call in calls))
        for *fields, calls in raw
    )
