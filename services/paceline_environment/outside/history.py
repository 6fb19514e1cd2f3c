"""The messages of an episode as servers of chat completions take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.environments.tool_calls import MAX_CALLS
from paceline.plugins import Message, Observation

ChatMessage = dict[str, Any]


class ChatHistory:
    """The dialogue so far. Calls of tools and their answers are paired by ids.

    A server refuses a dialogue in which a call has no answer, or an answer no call. Where an
    environment does not answer call for call, the dialogue is shown as plain text.
    """

    def __init__(self, messages: Sequence[ChatMessage] = ()) -> None:
        self.messages = list(messages)
        self._unanswered: list[str] = []  # ids of calls, in order
        self._called = -1  # index of the message with these calls
        if messages and messages[-1]["role"] == "assistant":
            self._await_answers(messages[-1])

    @property
    def ends_with_reply(self) -> bool:
        """Whether the last message is the policy's."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def observed(self, observation: Observation) -> None:
        """Add the messages of an observation; plain text is one of the user."""
        for message in observation.messages or (Message("user", observation.text),):
            self._add(message)
        if self._unanswered:
            self._as_text()

    def replied(self, message: ChatMessage) -> None:
        """Add a message of the policy, as `replies.read_reply` returns it."""
        self.messages.append(message)
        self._await_answers(message)

    def pop(self) -> ChatMessage:
        """Remove the last message."""
        self._unanswered = []
        return self.messages.pop()

    def _add(self, message: Message) -> None:
        if message.role == "tool":
            self._answer(message)
            return
        if self._unanswered:
            self._as_text()
        added: ChatMessage = {"role": message.role, "content": message.content}
        if message.tool_calls:
            first = len(self.messages)
            calls = [_call(call, f"call_{first}_{n}") for n, call in enumerate(message.tool_calls)]
            added["tool_calls"] = calls
        self.messages.append(added)
        self._await_answers(added)

    def _await_answers(self, message: ChatMessage) -> None:
        self._unanswered = [call["id"] for call in message.get("tool_calls", ())]
        self._called = len(self.messages) - 1

    def _answer(self, message: Message) -> None:
        if not self._unanswered:
            self.messages.append({"role": "user", "content": message.content})
            return
        known = message.tool_call_id in self._unanswered
        answered = message.tool_call_id if known else self._unanswered[0]
        self._unanswered.remove(answered)
        self.messages.append({"role": "tool", "tool_call_id": answered, "content": message.content})

    def _as_text(self) -> None:
        """Show the last calls, which are not all answered, and their answers as plain text."""
        caller = self.messages[self._called]
        calls = caller.pop("tool_calls")
        functions = [call["function"] for call in calls]
        caller["content"] = action_of(
            caller["content"], [(function["name"], function["arguments"]) for function in functions]
        )
        for answer in self.messages[self._called + 1 :]:
            answer.pop("tool_call_id", None)
            answer["role"] = "user" if answer["role"] == "tool" else answer["role"]
        self._unanswered = []


def action_of(content: str, calls: Sequence[tuple[str, str]]) -> str:
    """A turn as environments are given it: text, then calls of tools as Hermes writes them.

    `calls`: names, and arguments as JSON; what is no JSON stays, and the environment says so.
    """
    lines = [content] if content else []
    for name, arguments in calls[:MAX_CALLS]:
        call = f'{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}'
        lines.append(f"<tool_call>\n{call}\n</tool_call>")
    return "\n".join(lines)


def _call(call: Mapping[str, Any], otherwise: str) -> ChatMessage:
    """A call of a task's message, whose arguments are text at a server."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    return {
        "id": str(call.get("id") or otherwise),
        "type": "function",
        "function": {
            "name": str(function.get("name", "")),
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }
