"""A transform: changes the prompt that the policy is shown."""

from __future__ import annotations

from dataclasses import replace

from paceline.platform.digest import number
from paceline.plugins import Observation, TransformContext, Variant


async def addressed(
    observation: Observation, context: TransformContext, *, names: list[str]
) -> Variant:
    """Address the policy by a name, which is drawn for each group."""
    name = names[number("addressed", context.seed) % len(names)]
    messages = tuple(
        replace(each, content=f"{name}, {each.content}") if each.role == "user" else each
        for each in observation.messages
    )
    text = f"{name}, {observation.text}" if observation.text else ""
    return Variant(messages, text, name=name)
