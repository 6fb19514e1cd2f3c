"""Runs an environment in a process of a job, its tasks and worlds of episodes; or its transform.

Each call has a thread, so a world that blocks holds up no other of the process; coroutines run on
one loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, cast

from paceline.enums import Purpose
from paceline.errors import InvalidError
from paceline.isolation.child import Function, ServedCall, raised, serve
from paceline.isolation.code.dialogue import message_fields, observation_fields, observation_of
from paceline.platform.digest import task_id
from paceline.plugins import EnvironmentPlugin, Observation, StepResult, TransformContext, Variant
from paceline.plugins.loading import attribute
from paceline.types import Task

_M_ARENA_MAX = -8  # malloc.h
TASKS_PER_FRAME, CHARS_PER_FRAME = 200, 128 << 10


def main(target: str, threads: int) -> None:
    """Serve calls on standard input for the environment `module:attribute`."""
    threading.stack_size(1 << 20)
    _few_arenas()
    # Packages that ask for it when they are imported would fail where nothing can be written.
    tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
    serve(_Worlds(target, threads).functions(), threads=threads, words=_words)


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, InvalidError) else raised(error)


def _few_arenas() -> None:
    """Keep threads from reserving 64 MiB of the limited address space each, as glibc lets them."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


class _Worlds:
    """The worlds of this process; answers calls from several threads."""

    def __init__(self, target: str, threads: int) -> None:
        self._target = target
        self._loading = threading.Lock()
        self._plugin: EnvironmentPlugin | None = None
        self._make_world: Callable[..., Any] | None = None
        self._worlds: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()
        # For `asyncio.to_thread`: no more than there are calls, no fewer than those that may block.
        self._loop.set_default_executor(ThreadPoolExecutor(threads))
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def functions(self) -> Mapping[str, Function]:
        """The calls that are served, by name."""
        return {
            "tasks": self._tasks,
            "check_world": self._check_world,
            "load": self._load,
            "reset": self._reset,
            "step": self._step,
            "load_function": self._load_function,
            "transform": self._transformed,
            "close": self._close,
        }

    def _load(self, call: ServedCall) -> None:
        self._world_maker()

    def _load_function(self, call: ServedCall) -> None:
        self._function()

    def _step(self, call: ServedCall) -> dict[str, Any]:
        world = self._worlds[call.fields["world"]]
        return _result(self._call(world.step, call.fields["action"]))

    def _close(self, call: ServedCall) -> None:
        world = self._worlds.pop(call.fields["world"], None)
        if world is not None and hasattr(world, "close"):
            self._call(world.close)

    def _tasks(self, call: ServedCall) -> dict[str, Any]:
        request = call.fields
        made = self._loaded().load_tasks()(seed=request["seed"], **request["options"])
        size, found, num_chars = len(made), list[dict[str, Any]](), 0
        for position in range(min(size, request["most"])):
            task = _task(made[position], self._target)
            num_chars += len(task["payload"])
            if found and num_chars > CHARS_PER_FRAME:
                call.tell({"tasks": found})
                found, num_chars = [], len(task["payload"])
            found.append(task)
            if len(found) == TASKS_PER_FRAME:
                call.tell({"tasks": found})
                found, num_chars = [], 0
        return {"tasks": found, "size": size}

    def _check_world(self, call: ServedCall) -> dict[str, Any]:
        """Whether worlds can be made; `lacks` names a package that may be where they are made."""
        plugin = self._loaded()
        module = plugin.world.partition(":")[0]
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and not f"{module}.".startswith(f"{error.name}."):
                return {"lacks": error.name}
        make = self._world_maker()
        if not callable(make):
            raise TypeError(f"{plugin.world} is a {type(make).__name__}, no class and no function")
        lacking = [name for name in ("reset", "step") if not hasattr(make, name)]
        if inspect.isclass(make) and lacking:
            raise TypeError(f"{plugin.world} has no method {lacking[0]}")
        _check_options(plugin.world, make, call.fields["options"])
        return {}

    def _reset(self, call: ServedCall) -> dict[str, Any]:
        request = call.fields
        world = self._world_maker()(**request["options"])
        observation = self._call(world.reset, Task(**request["task"]), request["seed"])
        self._worlds[request["world"]] = world
        return {
            "observation": _observation(observation),
            "replayable": bool(getattr(world, "replayable", False)),
        }

    def _transformed(self, call: ServedCall) -> dict[str, Any]:
        request = call.fields
        observation, context = observation_of(request["observation"]), request["context"]
        told = TransformContext(
            task=Task(**context["task"]),
            purpose=Purpose(context["purpose"]),
            seed=context["seed"],
            variant=context["variant"],
            meta=context["meta"],
            tasks=tuple(Task(**each) for each in context["tasks"]),
        )
        function = self._function()
        found = self._call(partial(function, **request["options"]), observation, told)
        if not isinstance(found, Variant):
            raise InvalidError(f"it returned {type(found).__name__}; Variant is needed")
        return {
            "messages": [message_fields(each) for each in found.messages],
            "text": found.text,
            "name": found.name,
            "meta": dict(found.meta),
            "train_as": found.train_as,
        }

    def _function(self) -> Callable[..., Any]:
        with self._loading:
            found = attribute(self._target)
        if not callable(found):
            raise TypeError(f"{self._target} is a {type(found).__name__}, no function")
        return found

    def _world_maker(self) -> Callable[..., Any]:
        with self._loading:
            if self._make_world is None:
                self._make_world = self._loaded().load_world()
            return self._make_world

    def _loaded(self) -> EnvironmentPlugin:
        if self._plugin is None:
            found = attribute(self._target)
            if not isinstance(found, EnvironmentPlugin):
                raise TypeError(f"{self._target} is a {type(found).__name__}, no EnvironmentPlugin")
            self._plugin = found
        return self._plugin

    def _call(self, function: Callable[..., Any], *given: Any) -> Any:
        value = function(*given)
        if inspect.iscoroutine(value):
            return asyncio.run_coroutine_threadsafe(value, self._loop).result()
        return value


def _check_options(target: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `InvalidError` for a world that cannot be made with these options."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # of a class that is not written in Python
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise InvalidError(
            f"{target} takes {signature}: {error}; a world is made with the options of the tasks "
            "as keywords"
        ) from None


def _task(value: Any, environment: str) -> dict[str, Any]:
    """A task as JSON; it may be a `Task`, or what its payload is to be."""
    if not isinstance(value, Task):
        payload = json.dumps(value)
        value = Task(task_id(environment, payload, 0), environment, payload)
    fields = ("task_id", "environment", "payload", "seed", "domain")
    return {name: getattr(value, name) for name in fields}


def _observation(value: Any) -> dict[str, Any]:
    """An observation as JSON; it may be an `Observation`, or the text of one."""
    if value is None or isinstance(value, str):
        value = Observation(text=value or "")
    if not isinstance(value, Observation):
        raise TypeError(f"an observation is due, or a string; got {type(value).__name__}")
    return observation_fields(value)


def _result(value: Any) -> dict[str, Any]:
    """The result of a step as JSON; it may be a `StepResult` or (observation, reward, done)."""
    if isinstance(value, tuple):
        observation, reward, done = cast("tuple[Any, ...]", value)
        value = StepResult(observation, reward, done)
    if not isinstance(value, StepResult):
        raise TypeError(
            f"a StepResult is due, or (observation, reward, done); got {type(value).__name__}"
        )
    return {
        "observation": _observation(value.observation),
        "reward": float(value.reward),
        "done": bool(value.done),
        "truncated": bool(value.truncated),
    }
