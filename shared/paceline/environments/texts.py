"""Observations from templates in the options of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from paceline.errors import InvalidError
from paceline.plugins import Message, Observation

_FIELD = re.compile(r"\{(\w+)\}")
_LISTED = 20  # fields in a message
Template = Annotated[str, Field(max_length=32_768)]


def fields_of(template: str) -> set[str]:
    """The fields that a template names, as `{field}`."""
    return set(_FIELD.findall(template))


def filled(template: str, fields: Mapping[str, str], *, option: str) -> str:
    """A template with its fields replaced; all else, such as other braces, stays.

    Raises:
        InvalidError: it names another field; `option` is where the template is from.
    """
    if unknown := sorted(fields_of(template) - fields.keys()):
        allowed = ", ".join([*fields][:_LISTED]) or "none"
        raise InvalidError(f"tasks.options.{option}: {{{unknown[0]}}}; allowed: {allowed}")
    return _FIELD.sub(lambda match: fields[match[1]], template)


def user_message(text: str, *, system_prompt: str = "") -> Observation:
    """A message of the user, after the system prompt if there is one."""
    user = Message("user", text)
    if not system_prompt:
        return Observation(messages=(user,), text=text)
    messages = (Message("system", system_prompt), user)
    return Observation(messages=messages, text=f"{system_prompt}\n\n{text}")
