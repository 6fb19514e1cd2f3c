"""An environment on an OpenEnv server as a world that is played in text."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from paceline.environments.openenv.options import (
    OpenEnvOptions,
    OpenEnvSettings,
    endpoint,
    is_allowed,
)
from paceline.environments.openenv.session import (
    ActionRefusedError,
    OpenEnvError,
    OpenEnvSession,
    ServerFullError,
)
from paceline.environments.seeded import seed_of
from paceline.environments.texts import filled, user_message
from paceline.errors import InvalidError
from paceline.plugins import Observation, StepResult
from paceline.types import Task

_RETRY_S, _MOST_RETRY_S = 0.1, 2.0
_DIGITS = 40  # of a number, more than any has that JSON can carry exactly


class OpenEnvWorld:
    """Plays an episode in a session of its own.

    A server without a free session is asked again until one is free, or the call is cut off.
    A reply that does not fit the environment's actions is answered with what is wrong, and counts
    as a turn. Any other failure of the server fails the attempt.
    """

    def __init__(self, *, settings: Mapping[str, Any], **options: Any) -> None:
        """`settings` are those of `OpenEnvSettings`, options those of `OpenEnvOptions`.

        Raises:
            InvalidError: the operator does not allow the server.
        """
        self._options = OpenEnvOptions.model_validate(options)
        self.replayable = self._options.replayable
        self._url, address = endpoint(self._options.base_url)
        if not is_allowed(address, OpenEnvSettings.model_validate(settings)):
            raise InvalidError(
                f"tasks.options.base_url: {address} is not allowed here; an operator can allow it "
                "in options.worlds.openenv.allow of the environment workers"
            )
        self._session: OpenEnvSession | None = None
        self._turns = 0
        self._shown: dict[str, str] = {}  # the last observation

    async def reset(self, task: Task, seed: int) -> Observation:
        """Open a session and reset its environment with the seed of the task."""
        start = {
            **self._options.reset,
            "seed": seed_of(task),
            "episode_id": f"{task.task_id}-{seed}",
        }
        answer = await self._open(start)
        if answer.get("done") is True:
            raise OpenEnvError("OpenEnv server: the episode is over after its reset")
        self._shown = _fields(answer)
        text = self._fill("prompt", self._shown)
        return user_message(text, system_prompt=self._options.system_prompt)

    async def step(self, action: str) -> StepResult:
        """Send a reply as an action."""
        options = self._options
        assert self._session is not None
        self._turns += 1
        is_last = self._turns >= options.max_turns
        try:
            answer = await self._session.ask("step", self._action(action))
        except ActionRefusedError as error:
            text = self._fill("invalid", {**self._shown, "problem": error.message})
            return StepResult(
                user_message(text), options.invalid_reward, done=False, truncated=is_last
            )
        done = answer.get("done") is True
        self._shown = _fields(answer)
        text = "" if done else self._fill("template", self._shown)
        return StepResult(
            user_message(text), _reward(answer), done=done, truncated=is_last and not done
        )

    async def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _open(self, start: dict[str, Any]) -> dict[str, Any]:
        """The answer to the reset of a new session."""
        pause_s = _RETRY_S
        while True:
            session = self._session = await OpenEnvSession.open(self._url)
            try:
                return await session.ask("reset", start)
            except ActionRefusedError as error:
                raise InvalidError(f"tasks.options.reset: {error.message}") from None
            except ServerFullError:
                await self.close()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_RETRY_S)

    def _action(self, reply: str) -> dict[str, Any]:
        options = self._options
        if options.action == "json":
            return {**_object(reply), **options.fixed}
        value: Any = reply
        if options.action != "text":
            value = _number(reply, integer=options.action == "integer")
        return {**options.fixed, options.field: value}

    def _fill(self, option: str, fields: Mapping[str, str]) -> str:
        return filled(str(getattr(self._options, option)), fields, option=option)


def _object(reply: str) -> dict[str, Any]:
    """A reply that is a JSON object; raises `ActionRefusedError`."""
    try:
        action = json.loads(reply)
        json.dumps(action, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ActionRefusedError(f"a JSON object is needed: {error}") from None
    if not isinstance(action, dict):
        raise ActionRefusedError("a JSON object is needed")
    return cast("dict[str, Any]", action)


def _number(reply: str, *, integer: bool) -> float | int:
    """A reply that is a number; raises `ActionRefusedError`."""
    text = reply.strip()
    try:
        if len(text) > _DIGITS:
            raise ValueError("it is too long")
        value = int(text) if integer else float(text)
    except ValueError:
        raise ActionRefusedError(
            "an integer is needed" if integer else "a number is needed"
        ) from None
    if not math.isfinite(value):
        raise ActionRefusedError("a number is needed")
    return value


def _fields(answer: Mapping[str, Any]) -> dict[str, str]:
    """The fields of an observation as text, and all of them as lines."""
    raw = answer.get("observation")
    if not isinstance(raw, dict):
        raise OpenEnvError("OpenEnv server: an observation is no object")
    fields = {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in cast("dict[str, Any]", raw).items()
        if name != "metadata"
    }
    lines = "\n".join(f"{name}: {text}" for name, text in fields.items())
    return {"observation": lines, **fields}


def _reward(answer: Mapping[str, Any]) -> float:
    reward = answer.get("reward")
    if reward is None:
        return 0.0
    with suppress(OverflowError):
        if isinstance(reward, (int, float)) and math.isfinite(reward):
            return float(reward)
    raise OpenEnvError(f"OpenEnv server: the reward {str(reward)[:80]} is no finite number")
