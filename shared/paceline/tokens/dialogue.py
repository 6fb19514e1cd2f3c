"""Renders the observations of an episode incrementally, wherever the tokenizer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from paceline.enums import TokenSource
from paceline.errors import InvalidError
from paceline.plugins import Message, Observation
from paceline.tokens.bridge import bridge
from paceline.tokens.chat import (
    TEMPLATE,
    TOKENIZER,
    At,
    RejectedMessagesError,
    Rendered,
    Tokenizer,
    nowhere,
    place_of,
)
from paceline.tokens.steps import TAIL_TOKENS, TURN, DialogueStep, RenderedPrefix
from paceline.types import TokenSpan

_OTHER = "other: "


class DialogueState:
    """What has been said in an episode.

    `observed` says how the next observation is to be rendered and `shown` that it was; `turn` ends
    the turn of the policy that follows. Later renderings contain a placeholder for each sampled
    turn, whose tokens are in the transcript.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        """`max_bytes` limits the text of one observation."""
        self._max_bytes = max_bytes
        self._messages: list[Message] = []
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._prefix = RenderedPrefix()
        self._turns = 0
        self._tail: tuple[int, ...] = ()
        self._now = datetime.now()  # a template with the date must not change at midnight

    def observed(self, observation: Observation) -> DialogueStep:
        """How to render an observation, given everything before it.

        One that is plain text is a message of the user to models with a chat template.

        Raises:
            InvalidError: it may not offer these tools, or has reserved characters.
            LimitError: it is too long.
        """
        if observation.tools:
            self._offer(observation)
        new = observation.messages or (Message("user", observation.text),)
        if any(TURN in message.content for message in new):
            raise InvalidError(f"environment: an observation contains {TURN!r}, which is reserved")
        self._messages.extend(new)
        step = DialogueStep(
            messages=tuple(self._messages),
            num_new=len(new),
            text=observation.text,
            tools=self._tools,
            offers_tools=bool(observation.tools),
            num_turns=self._turns,
            turn_tail=self._tail,
            prefix=self._prefix,
            now=self._now,
            max_bytes=self._max_bytes,
        )
        step.check_size(observation.text, *(m.content for m in observation.messages))
        return step

    def shown(self, prefix: RenderedPrefix) -> None:
        """The observation is rendered, and with it so much of the dialogue."""
        self._prefix = prefix

    def turn(self, tokens: Sequence[int]) -> None:
        """End the policy's turn, of these tokens; its last ones may be the template's end."""
        self._turns += 1
        self._messages.append(Message("assistant", TURN))
        self._tail = tuple(tokens[-TAIL_TOKENS:])

    def _offer(self, observation: Observation) -> None:
        if self._turns:
            raise InvalidError("environment: tools: only the first observation may have any")
        if not observation.messages:
            raise InvalidError("environment: tools: such an observation needs `messages` too")
        for index, tool in enumerate(observation.tools):
            if not _is_function(tool):
                raise InvalidError(
                    f"environment: tools[{index}]: {str(tool)[:200]}; allowed: {{type: function, "
                    "function: {name, description, parameters}}"
                )
        self._tools = observation.tools


class Dialogue:
    """A dialogue whose tokenizer is in this process."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int | None = None) -> None:
        """`max_bytes` limits the text of one observation."""
        self._tokenizer = tokenizer
        self._state = DialogueState(max_bytes=max_bytes)

    def show(self, observation: Observation) -> Rendered:
        """Tokens of an observation, given everything before it; raises as `render_step`."""
        rendered, prefix = render_step(self._tokenizer, self._state.observed(observation))
        self._state.shown(prefix)
        return rendered

    def turn(self, tokens: Sequence[int]) -> None:
        """End the policy's turn, of these tokens; its last ones may be the template's end."""
        self._state.turn(tokens)


def render_step(
    tokenizer: Tokenizer, step: DialogueStep, *, at: At = nowhere
) -> tuple[Rendered, RenderedPrefix]:
    """Tokens of the newest observation, and what was rendered by then.

    `at` is told which part of the tokenizer works next, as it may not return.

    Raises:
        InvalidError: the template cannot show the dialogue in turns, or not with these tools.
        LimitError: the observation is too long.
    """
    new = step.new
    if not tokenizer.chat and (step.offers_tools or any(each.tool_calls for each in new)):
        raise InvalidError(
            "model.path: the model has no chat template, but this environment offers tools or "
            "shows calls of some"
        )
    if not tokenizer.chat:
        at(TOKENIZER)
        return _plain(tokenizer, step, new), step.prefix
    if step.num_turns:
        rendered, prefix, text = bridge(tokenizer, step, at=at)
        _check_tools_are_shown(tokenizer, step, new, text)
        return rendered, prefix
    at(TEMPLATE)
    text = tokenizer.render(step.messages, tools=step.tools, now=step.now)
    _check_tools_are_shown(tokenizer, step, new, text)
    _check_contents_are_shown(tokenizer, step, text)
    step.check_size(text)
    at(TOKENIZER)
    return tokenizer.encoded(text).rendered(new), RenderedPrefix.of(text)


def _check_tools_are_shown(
    tokenizer: Tokenizer, step: DialogueStep, new: Sequence[Message], text: str
) -> None:
    """Raise `InvalidError` if the text is the same without tools, or without the calls in `new`."""
    if step.offers_tools and text == tokenizer.render(step.messages, now=step.now):
        raise InvalidError(
            "model.path: the chat template ignores `tools`, which this environment offers; "
            "use a model whose template renders them"
        )
    if any(message.tool_calls for message in new):
        silent = [replace(message, tool_calls=()) for message in step.messages]
        with suppress(RejectedMessagesError):  # one that wants a call before an answer
            if text == tokenizer.render(silent, tools=step.tools, now=step.now):
                raise InvalidError(
                    "model.path: the chat template ignores `tool_calls`, which messages of the "
                    "task have; use a model whose template renders them"
                )


def _check_contents_are_shown(tokenizer: Tokenizer, step: DialogueStep, text: str) -> None:
    """Raise `RejectedMessagesError` if the text is the same without what somebody says.

    An assistant may be cut: templates leave out what it thought.
    """
    messages = step.messages
    for index, message in enumerate(messages):
        said = message.content
        if message.role == "assistant" or not said.strip() or place_of(said, text, 0) is not None:
            continue
        other = (
            *messages[:index],
            replace(message, content=f"{_OTHER}{said}"),
            *messages[index + 1 :],
        )
        if text == tokenizer.render(other, tools=step.tools, now=step.now):
            raise RejectedMessagesError(
                f"model.path: chat template: it ignores the content of message {index}, of the "
                f"role {message.role!r}, if it is a text; use a model whose template shows it"
            )


def _plain(tokenizer: Tokenizer, step: DialogueStep, new: Sequence[Message]) -> Rendered:
    text = step.text or "\n".join(message.content for message in new)
    tokens = tuple(tokenizer.encode(text, special=not step.num_turns))
    return Rendered(tokens, (TokenSpan(0, len(tokens), TokenSource.ENVIRONMENT),))


def _is_function(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return tool.get("type") == "function" and named
