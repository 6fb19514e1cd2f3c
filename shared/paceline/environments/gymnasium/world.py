"""An environment of Gymnasium as a world that is played in text."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from functools import lru_cache
from typing import Any

from paceline.environments.gymnasium.options import GymnasiumOptions
from paceline.environments.seeded import seed_of
from paceline.environments.texts import fields_of, filled, user_message
from paceline.errors import InvalidError
from paceline.errors.extras import installing
from paceline.plugins import Observation, StepResult
from paceline.types import Task

try:
    import gymnasium
except ImportError as error:
    raise InvalidError(f"gymnasium is needed; {installing('gymnasium')} ({error})") from None

from paceline.environments.gymnasium.spaces import Actions, parts, shown

_COLOURED = re.compile("\x1b\\[[0-9;]+m([^\x1b]*)\x1b\\[0?m")
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")
Env = gymnasium.Env[Any, Any]


class GymnasiumWorld:
    """Plays an episode of a registered environment; its calls run in threads, so they may block.

    A reply that is no action is answered with what is allowed, and counts as a turn.
    """

    def __init__(self, **options: Any) -> None:
        """Options are those of `GymnasiumOptions`."""
        self._options = GymnasiumOptions.model_validate(options)
        self.replayable = self._options.replayable
        self._idle = _idle(self._options.id, json.dumps(_kwargs(self._options), sort_keys=True))
        self._env: Env | None = None
        self._actions: Actions | None = None
        self._observation: Any = None
        self._turns = 0
        self._in_call = False  # also after one that has raised

    async def reset(self, task: Task, seed: int) -> Observation:
        """Reset with the seed of the task: all episodes of a group begin alike."""
        del seed
        return await asyncio.to_thread(self._reset, seed_of(task))

    async def step(self, action: str) -> StepResult:
        """Take the action that a reply stands for."""
        return await asyncio.to_thread(self._step, action)

    async def close(self) -> None:
        """Keep the environment for another episode, unless it has failed or still computes."""
        env, self._env = self._env, None
        if env is None or self._in_call:
            return
        if self._options.reuse:
            self._idle.give(env)
        else:
            await asyncio.to_thread(env.close)

    def _reset(self, seed: int) -> Observation:
        self._in_call = True
        env = self._env = self._idle.take()
        options = self._options
        self._actions = Actions(env.action_space, options.actions, exact=options.match == "exact")
        self._observation, _ = env.reset(seed=seed)
        text = self._fill("prompt")
        self._in_call = False
        return user_message(text, system_prompt=options.system_prompt)

    def _step(self, reply: str) -> StepResult:
        env, actions, options = self._env, self._actions, self._options
        assert env is not None
        assert actions is not None
        self._turns += 1
        is_last = self._turns >= options.max_turns
        action = actions.parsed(reply)
        if action is None:
            text = self._fill("invalid")
            ends = options.invalid_ends
            return _result(text, options.invalid_reward, done=ends, truncated=is_last)
        self._in_call = True
        self._observation, reward, terminated, truncated, _ = env.step(action)
        text = self._fill("template")
        self._in_call = False
        return _result(text, float(reward), done=terminated, truncated=truncated or is_last)

    def _fill(self, option: str) -> str:
        """A text of the options, with the parts of the newest observation."""
        env, actions, options = self._env, self._actions, self._options
        assert env is not None
        assert actions is not None
        template = str(getattr(options, option))
        wanted = fields_of(template)
        space, observation = env.observation_space, self._observation
        fields = {"actions": actions.described(), **parts(space, observation)}
        if "observation" in wanted:
            fields["observation"] = shown(space, observation, options.observations)
        if "render" in wanted:
            fields["render"] = _plain(str(env.render()))
        return filled(template, fields, option=option)


class _Idle:
    """Environments that have played an episode and wait for the next."""

    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        self._name, self._kwargs = name, kwargs
        self._environments: list[Env] = []
        self._lock = threading.Lock()

    def take(self) -> Env:
        """One that waits, or a new one; raises `InvalidError` if there is no such environment."""
        with self._lock:
            if self._environments:
                return self._environments.pop()
        try:
            return gymnasium.make(self._name, disable_env_checker=True, **self._kwargs)
        except (gymnasium.error.Error, TypeError) as error:
            raise InvalidError(f"tasks.options: gymnasium.make({self._name!r}): {error}") from None

    def give(self, env: Env) -> None:
        """Keep one whose episode is over."""
        with self._lock:
            self._environments.append(env)


@lru_cache(maxsize=8)
def _idle(name: str, kwargs: str) -> _Idle:
    """State that episodes with the same environment share in this process."""
    return _Idle(name, json.loads(kwargs))


def _plain(drawing: str) -> str:
    """A drawing for terminals as plain text: what is coloured is in brackets."""
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", drawing)).strip("\n")


def _kwargs(options: GymnasiumOptions) -> dict[str, Any]:
    texts = (options.prompt, options.template, options.invalid)
    draws = any("{render}" in text for text in texts)
    return ({"render_mode": "ansi"} if draws else {}) | options.kwargs


def _result(text: str, reward: float, *, done: bool, truncated: bool) -> StepResult:
    truncated = bool(truncated and not done)
    return StepResult(user_message(text), reward, done=bool(done), truncated=truncated)
