"""Rewrites the question of a first observation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.errors import InvalidError
from paceline.plugins import Message, Observation, Variant


def rewritten(observation: Observation, change: Callable[[str], str]) -> Variant:
    """The prompt with a change of its last message of the user, and of its text.

    Raises:
        InvalidError: it has messages, but none of the user.
    """
    text = change(observation.text) if observation.text else ""
    if not observation.messages:
        return Variant(text=text)
    messages = list(observation.messages)
    places = [place for place, message in enumerate(messages) if message.role == "user"]
    if not places:
        raise InvalidError("the first observation has no message of the user")
    question: Message = messages[places[-1]]
    messages[places[-1]] = replace(question, content=change(question.content))
    return Variant(messages=tuple(messages), text=text)
