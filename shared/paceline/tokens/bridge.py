"""What a chat template shows between two turns of the policy, as tokens that continue its turn.

A dialogue is rendered with a placeholder for each sampled turn, whose tokens stay as they are. What
follows the last placeholder is the bridge to the next turn. Templates may show the beginning of an
earlier turn otherwise than the prompt for it did (an empty `<think>` block, a blank), since that
part is already in the transcript; what the environment said has to stay as it was shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import InvalidError, LimitError
from paceline.plugins import Message
from paceline.tokens.chat import TEMPLATE, TOKENIZER, At, Rendered, Tokenizer, place_of
from paceline.tokens.steps import TURN, DialogueStep, RenderedPrefix

_SHOWN = "\u2042paceline-shown\u2042"
_CALL_ID = "paceline0"  # nine letters and digits, as templates of Mistral want them
_REWRITES = (
    "model.path: the chat template {what} when a later turn is added, so that what the policy has "
    "sampled cannot be continued; use a template that keeps earlier turns (chat_template.jinja in "
    "the model's folder), or an environment with one turn"
)


@dataclass(frozen=True, slots=True)
class _View:
    """A dialogue as it is given to the template."""

    messages: tuple[Message, ...]

    def has_made_up_calls(self, num_new: int) -> bool:
        """Whether the policy's last turn has, since tools answer it."""
        return bool(self.messages[len(self.messages) - num_new - 1].tool_calls)

    def before(self, num_new: int) -> tuple[Message, ...]:
        """The messages for which the policy's last turn was sampled."""
        return self.messages[: len(self.messages) - num_new - 1]

    def with_first_new(self, num_new: int, content: str) -> tuple[Message, ...]:
        """The messages with another content of the first new one."""
        at = len(self.messages) - num_new
        first = replace(self.messages[at], content=content)
        return (*self.messages[:at], first, *self.messages[at + 1 :])


def bridge(
    tokenizer: Tokenizer, step: DialogueStep, *, at: At
) -> tuple[Rendered, RenderedPrefix, str]:
    """Tokens that follow the policy's last turn, and the text of the whole dialogue.

    Raises:
        InvalidError: the template cannot show the dialogue so that it continues the turns.
        LimitError: the observation is too long.
    """
    problem: InvalidError | None = None
    for view in _views(step.messages):
        try:
            at(TEMPLATE)
            text = _text(tokenizer, step, view.messages)
            delta = _delta(tokenizer, step, view, text)
            step.check_size(delta)
            return _tokens(tokenizer, step, view, delta, at), RenderedPrefix.of(text), text
        except LimitError:
            raise
        except InvalidError as error:
            problem = error
    assert problem is not None
    raise problem


def _views(messages: tuple[Message, ...]) -> list[_View]:
    """The dialogue as it is; if tools answer a turn, also with calls that templates may want."""
    views = [_View(messages)]
    shown = list(messages)
    calls = list[dict[str, Any]]()
    for at in range(len(shown) - 1, -1, -1):
        message = shown[at]
        if message.role == "tool":
            shown[at] = replace(message, tool_call_id=message.tool_call_id or _CALL_ID)
            function = {"name": message.name or "tool", "arguments": dict[str, Any]()}
            called = shown[at].tool_call_id
            calls.insert(0, {"type": "function", "id": called, "function": function})
            continue
        if calls and message.content == TURN:
            shown[at] = replace(message, tool_calls=tuple(calls))
        calls = []
    if any(message.content == TURN and message.tool_calls for message in shown):
        views.append(_View(tuple(shown)))
    return views


def _text(tokenizer: Tokenizer, step: DialogueStep, messages: Sequence[Message]) -> str:
    return tokenizer.render(messages, tools=step.tools, now=step.now)


def _delta(tokenizer: Tokenizer, step: DialogueStep, view: _View, text: str) -> str:
    """The text that follows the policy's last turn."""
    if text.count(TURN) != step.num_turns:
        raise InvalidError(_REWRITES.format(what="drops earlier turns"))
    length = step.prefix.length
    if RenderedPrefix.of(text[:length]) != step.prefix or not text.startswith(TURN, length):
        _check_kept(_text(tokenizer, step, view.before(step.num_new)), text, view.messages)
    delta = text.rpartition(TURN)[2]
    if any(place_of(each.content, delta, 0) is None for each in step.new):
        _check_shown(tokenizer, step, view)
    return delta


def _check_kept(before: str, text: str, messages: Sequence[Message]) -> None:
    """Raise `InvalidError` if what the environment has said is no longer shown as it was."""
    contents = _contents(messages)
    for was, now, said in zip(before.split(TURN), text.split(TURN), contents, strict=False):
        if was == now:
            continue
        end = 0
        for content in said:
            place = place_of(content, was, end)
            end = place[1] if place else len(was)
        if was[:end] != now[:end]:
            raise InvalidError(_REWRITES.format(what="rewrites earlier messages"))


def _contents(messages: Sequence[Message]) -> list[list[str]]:
    """What was said before each turn of the policy, and after the last."""
    said: list[list[str]] = [[]]
    for message in messages:
        if message.content == TURN:
            said.append([])
        elif message.content.strip():
            said[-1].append(message.content)
    return said


def _check_shown(tokenizer: Tokenizer, step: DialogueStep, view: _View) -> None:
    """Raise `InvalidError` for a template that shows nothing of a new message."""
    first = len(view.messages) - step.num_new
    for at in range(first, len(view.messages)):
        changed = list(view.messages)
        changed[at] = replace(changed[at], content=_SHOWN)
        if _SHOWN not in _text(tokenizer, step, changed):
            raise InvalidError(
                f"model.path: the chat template does not show a message with the role "
                f"{view.messages[at].role!r} after a turn of the policy; use a model whose "
                "template does, or another role"
            )


def _tokens(tokenizer: Tokenizer, step: DialogueStep, view: _View, delta: str, at: At) -> Rendered:
    """Tokens of the bridge, without what the policy has written of it."""
    at(TOKENIZER)
    encoded = tokenizer.continued(delta)
    tail = step.turn_tail
    if tail and encoded.ids[:1] == [tail[-1]] and tokenizer.is_special(tail[-1]):
        return encoded.rendered(step.new, skip=1)
    at(TEMPLATE)
    head = _head(tokenizer, step, view)
    at(TOKENIZER)
    num_before = sum(1 for _, end in encoded.offsets if end <= head)
    written = _num_written(tokenizer, step, view, encoded.ids[:num_before])
    return encoded.rendered(step.new, skip=written)


def _head(tokenizer: Tokenizer, step: DialogueStep, view: _View) -> int:
    """Characters of the bridge before the content of the first new message."""
    text = _text(tokenizer, step, view.with_first_new(step.num_new, _SHOWN))
    return max(text.rpartition(TURN)[2].find(_SHOWN), 0)


def _num_written(tokenizer: Tokenizer, step: DialogueStep, view: _View, ids: Sequence[int]) -> int:
    """How many tokens of a bridge the policy has written; `ids`: those before new content."""
    tail = step.turn_tail
    ended = bool(tail) and tokenizer.is_special(tail[-1])
    if ended and tail[-1] in ids:  # blanks and other tokens may come before it
        return ids.index(tail[-1]) + 1
    if view.has_made_up_calls(step.num_new):  # in place of those that the policy has written
        start, end = _end_after_calls(tokenizer, step, view, ids)
        return end if ended else start
    if ended:
        return _num_of_last_end(tokenizer, step, view, ids)
    for count in range(min(len(tail), len(ids)), 0, -1):
        if tuple(ids[:count]) == tail[-count:]:
            return count
    return 0


def _end_after_calls(
    tokenizer: Tokenizer, step: DialogueStep, view: _View, ids: Sequence[int]
) -> tuple[int, int]:
    """Which tokens [start, end) end a turn that calls tools."""
    at = next((at for at, token in enumerate(ids) if token in tokenizer.eos), None)
    if at is None:
        raise InvalidError(
            "model.path: the chat template ends a turn that calls tools with no token that "
            "ends the policy's; add its end to eos_token_id of generation_config.json"
        )
    closing = _closing(tokenizer, step, view)
    length = closing.index(ids[at]) + 1 if ids[at] in closing else 1
    start = at + 1 - length
    return (start if list(ids[start : at + 1]) == closing[:length] else at), at + 1


def _num_of_last_end(
    tokenizer: Tokenizer, step: DialogueStep, view: _View, ids: Sequence[int]
) -> int:
    """Tokens of an end in whose place the template has the policy's last token in a last turn."""
    closing = _closing(tokenizer, step, view)
    if step.turn_tail[-1] not in closing:
        return 0
    at = closing.index(step.turn_tail[-1])
    return at + 1 if list(ids[:at]) == closing[:at] and len(ids) > at else 0


def _closing(tokenizer: Tokenizer, step: DialogueStep, view: _View) -> list[int]:
    """Tokens after the policy's turn where it is the last of a dialogue, without calls."""
    dialogue = (*view.before(step.num_new), Message("assistant", TURN))
    text = tokenizer.render(dialogue, tools=step.tools, now=step.now, prompt=False)
    return tokenizer.continued(text.rpartition(TURN)[2]).ids
