"""Renders the observations of an episode incrementally, wherever the tokenizer is."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from paceline.enums import TokenSource
from paceline.errors import InvalidError, LimitError
from paceline.plugins import Message, Observation
from paceline.tokens.chat import (
    TEMPLATE,
    TOKENIZER,
    At,
    RejectedMessagesError,
    Rendered,
    Tokenizer,
    nowhere,
)
from paceline.types import TokenSpan

# Placeholder for a sampled turn in a rendered dialogue, so that no template sees, edits or drops
# sampled text.
_TURN = "\u2042paceline-turn\u2042"


@dataclass(frozen=True, slots=True)
class RenderedPrefix:
    """What was rendered of a dialogue so far: its number of characters, and their CRC-32."""

    length: int = 0
    crc: int = 0

    @classmethod
    def of(cls, text: str) -> RenderedPrefix:
        """That of a text."""
        return cls(len(text), zlib.crc32(text.encode(errors="surrogatepass")))


@dataclass(frozen=True, slots=True)
class DialogueStep:
    """An observation and the dialogue before it: all that rendering it takes."""

    messages: tuple[Message, ...]  # of the whole dialogue
    num_new: int  # of these, the last ones are those of the observation
    text: str  # for models without a chat template
    tools: tuple[Mapping[str, Any], ...]
    offers_tools: bool  # with this observation
    num_turns: int  # of the policy
    last_token: int  # of the last one; -1 if it was empty
    prefix: RenderedPrefix
    now: datetime
    max_bytes: int | None  # of its text

    def check_size(self, *texts: str) -> None:
        """Raise `LimitError` for texts that are longer together than an observation may be."""
        if self.max_bytes is None:
            return
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if num_bytes > self.max_bytes:
            raise LimitError(
                f"limit prompt_bytes: an observation has {num_bytes} bytes, but this installation "
                f"allows {self.max_bytes}; make the tasks shorter, or ask its operator to raise "
                "`limits.prompt_bytes`"
            )


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
        self._last_token = -1
        self._now = datetime.now()  # a template with the date must not change at midnight

    def observed(self, observation: Observation) -> DialogueStep:
        """How to render an observation, given everything before it.

        Raises:
            InvalidError: it may not offer these tools.
            LimitError: it is too long.
        """
        if observation.tools:
            self._offer(observation)
        self._messages.extend(observation.messages)
        step = DialogueStep(
            messages=tuple(self._messages),
            num_new=len(observation.messages),
            text=observation.text,
            tools=self._tools,
            offers_tools=bool(observation.tools),
            num_turns=self._turns,
            last_token=self._last_token,
            prefix=self._prefix,
            now=self._now,
            max_bytes=self._max_bytes,
        )
        step.check_size(observation.text, *(m.content for m in observation.messages))
        return step

    def shown(self, prefix: RenderedPrefix) -> None:
        """The observation is rendered, and with it so much of the dialogue."""
        self._prefix = prefix

    def turn(self, last_token: int) -> None:
        """End the policy's turn; its last token may be the template's end-of-turn token."""
        self._turns += 1
        self._messages.append(Message("assistant", _TURN))
        self._last_token = last_token

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

    def turn(self, last_token: int) -> None:
        """End the policy's turn; its last token may be the template's end-of-turn token."""
        self._state.turn(last_token)


def render_step(
    tokenizer: Tokenizer, step: DialogueStep, *, at: At = nowhere
) -> tuple[Rendered, RenderedPrefix]:
    """Tokens of the newest observation, and what was rendered by then.

    `at` is told which part of the tokenizer works next, as it may not return.

    Raises:
        InvalidError: the template cannot be rendered incrementally, or not with these tools.
        LimitError: the observation is too long.
    """
    new = step.messages[len(step.messages) - step.num_new :]
    if not tokenizer.chat and (step.offers_tools or any(each.tool_calls for each in new)):
        raise InvalidError(
            "model.path: the model has no chat template, but this environment offers tools or "
            "shows calls of some"
        )
    if not tokenizer.chat or not new:
        at(TOKENIZER)
        return _plain(tokenizer, step, new), step.prefix
    at(TEMPLATE)
    text = tokenizer.render(step.messages, tools=step.tools, now=step.now)
    _check_tools_are_shown(tokenizer, step, new, text)
    delta = _delta(tokenizer, step, text) if step.num_turns else text
    step.check_size(delta)
    at(TOKENIZER)
    return tokenizer.rendered(delta, new), RenderedPrefix.of(text)


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


def _delta(tokenizer: Tokenizer, step: DialogueStep, text: str) -> str:
    """What follows the policy's last turn."""
    length = step.prefix.length
    if RenderedPrefix.of(text[:length]) != step.prefix or not text.startswith(_TURN, length):
        raise InvalidError(
            "the chat template rewrites earlier turns when a later one is added, so it "
            "cannot be rendered incrementally; multi-turn environments need one that can"
        )
    ended = step.last_token in tokenizer.eos
    end = tokenizer.token(step.last_token) if ended else ""
    return text[length + len(_TURN) :].removeprefix(end)


def _plain(tokenizer: Tokenizer, step: DialogueStep, new: Sequence[Message]) -> Rendered:
    text = step.text or "\n".join(message.content for message in new)
    tokens = tuple(tokenizer.encode(text, special=not step.num_turns))
    return Rendered(tokens, (TokenSpan(0, len(tokens), TokenSource.ENVIRONMENT),))


def _is_function(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return tool.get("type") == "function" and named
