"""The world of rows: one prompt, one reply, compared with the answer as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.environments.dataset.options import DatasetOptions
from paceline.environments.texts import user_message
from paceline.errors import InvalidError
from paceline.platform.text import as_text
from paceline.plugins import (
    Environment,
    EnvironmentPlugin,
    Message,
    Observation,
    StepResult,
    registry,
)
from paceline.types import Task

_NOTHING = Observation()


class Dataset:
    """Single turn: reward 1 if the reply without surrounding white space is the answer.

    Rewards see the whole row as the payload of the task. Tasks of other environments are played in
    their own worlds.
    """

    def __init__(self, **options: Any) -> None:
        wanted = DatasetOptions.model_validate(options)
        self._system_prompt = wanted.system_prompt
        self._worlds = {e.environment: e.options for e in wanted.sources if e.environment}
        self._other: Environment | None = None
        self._answer: str | None = None

    @property
    def replayable(self) -> bool:
        """Whether the same actions rebuild the same state, whatever the task is from."""
        worlds = (registry.environment(name).load_world() for name in self._worlds)
        return all(bool(getattr(world, "replayable", False)) for world in worlds)

    async def reset(self, task: Task, seed: int) -> Observation:
        """Show the prompt."""
        if task.environment in self._worlds:
            self._other = _world_of(task.environment, self._worlds[task.environment])
            return await self._other.reset(task, seed)
        payload: Mapping[str, Any] = json.loads(task.payload)
        answer = payload.get("answer")
        self._answer = None if answer is None else as_text(answer).strip()
        return observation_of(payload, system_prompt=self._system_prompt)

    async def step(self, action: str) -> StepResult:
        """Compare the reply."""
        if self._other is not None:
            return await self._other.step(action)
        return StepResult(_NOTHING, reward=float(action.strip() == self._answer), done=True)

    async def close(self) -> None:
        """Release what the world of another environment holds."""
        if self._other is not None:
            await self._other.close()


def observation_of(payload: Mapping[str, Any], *, system_prompt: str = "") -> Observation:
    """The prompt of a row: its messages, or its question as one of the user."""
    listed = payload.get("tools")  # with a question, any column may have that name
    tools = tuple(listed) if isinstance(listed, list) else ()
    if "messages" not in payload:
        shown = user_message(str(payload["question"]), system_prompt=system_prompt)
        return replace(shown, tools=tools)
    messages = [_message(message) for message in payload["messages"]]
    if system_prompt and messages[0].role != "system":
        messages.insert(0, Message("system", system_prompt))
    text = "\n\n".join(message.content for message in messages)
    return Observation(messages=tuple(messages), text=text, tools=tools)


def _message(fields: Mapping[str, Any]) -> Message:
    calls = tuple(fields.get("tool_calls", ()))
    texts = {key: value for key, value in fields.items() if key != "tool_calls"}
    return Message(**texts, tool_calls=calls)


def mixable(name: str) -> EnvironmentPlugin:
    """An environment whose tasks can be mixed with rows.

    Raises:
        InvalidError: it is not installed, or its worlds do not live in the worker itself.
    """
    plugin = registry.environment(name)
    if plugin.worlds_in != "worker" or plugin.settings:
        raise InvalidError(
            f"worlds of {name!r} live in processes of their own; only environments "
            "of the worker itself can be mixed with rows"
        )
    return plugin


def _world_of(name: str, options: Mapping[str, Any]) -> Environment:
    return mixable(name).load_world()(**options)
