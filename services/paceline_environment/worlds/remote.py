"""The world of one episode, in a process of its job."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from paceline.isolation.code.dialogue import observation_of
from paceline.isolation.code.world_process import ProcessEndedError, WorldError
from paceline.plugins import Observation, StepResult
from paceline.types import Task
from paceline_environment.worlds.processes import HostProcess, JobProcesses

Result = TypeVar("Result")
_MOVES = 5
_CLOSE_S = 5.0
_numbers = itertools.count()


class RemoteWorld:
    """An `Environment` that lives elsewhere.

    If its process ends because of another episode, the world is built anew in another process from
    its actions, unless it is not `replayable`. An episode that was in a call then goes on in a
    process of its own; if that ends too, it is to blame.
    """

    def __init__(self, processes: JobProcesses, options: Mapping[str, Any]) -> None:
        self.replayable = False
        self._processes = processes
        self._options = dict(options)
        self._number = next(_numbers)
        self._host: HostProcess | None = None
        self._task: Task | None = None
        self._seed = 0
        self._actions: list[str] = []
        self._loading_s = 0.0  # spent until now
        self._loading_since: float | None = None

    @property
    def is_loading(self) -> bool:
        """Whether a call waits until the environment is loaded in a process."""
        return self._loading_since is not None

    def loading_s(self) -> float:
        """How long calls have waited until the environment was loaded, in seconds."""
        since, now = self._loading_since, self._processes.clock()
        return self._loading_s + (0.0 if since is None else now - since)

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment`."""
        self._task, self._seed, self._actions = task, seed, []
        return await self._surviving(self._reset)

    async def step(self, action: str) -> StepResult:
        """See `Environment`."""
        result = await self._surviving(lambda host: self._step(host, action))
        self._actions.append(action)
        return result

    async def close(self) -> None:
        """See `Environment`; a world whose process has ended is closed."""
        host, self._host = self._host, None
        if host is None:
            return
        try:
            if not host.process.ended:
                async with asyncio.timeout(_CLOSE_S):
                    await self._call(host, "close")
        except (ProcessEndedError, TimeoutError):  # it is closed, or soon ends
            pass
        finally:
            await self._processes.leave(host)

    async def _surviving(self, act: Callable[[HostProcess], Awaitable[Result]]) -> Result:
        """Act in the world, which is moved if its process ends."""
        alone = False
        for _ in range(_MOVES):
            try:
                return await act(await self._ensure_host(alone=alone, again=act != self._reset))
            except ProcessEndedError as error:
                why = error.message
                if alone or self._is_lost(act):
                    break
                alone = self._host is not None and not self._host.killed
        else:
            why = f"was moved {_MOVES} times, as processes ended"
        raise WorldError(f"environment: {why}")

    def _is_lost(self, act: object) -> bool:
        """Whether what has happened in the world before `act` cannot happen again."""
        return act != self._reset and not self.replayable

    async def _ensure_host(self, *, alone: bool, again: bool) -> HostProcess:
        """The process of the world; if it has ended, another in which the world is rebuilt."""
        host = self._host
        if host is not None and not host.process.ended:
            return host
        if host is not None:
            if again and not self.replayable:  # what the policy has seen may not come again
                raise ProcessEndedError(host.process.why)
            self._host = None
            await self._processes.leave(host)
        host = self._host = await self._processes.host(alone=alone)
        await self._wait_until_loaded(host)
        if again:
            await self._reset(host)
            for action in self._actions:
                await self._step(host, action)
        return host

    async def _wait_until_loaded(self, host: HostProcess) -> None:
        """Wait until the environment is loaded.

        Raises:
            WorldError: it cannot be, or takes too long.
            ProcessEndedError: its process was ended for another job.
        """
        self._loading_since = self._processes.clock()
        try:
            await asyncio.shield(host.loading)
        except ProcessEndedError as error:
            if host.killed:
                raise
            raise WorldError(f"environment: while it was loaded: {error.message}") from None
        finally:
            self._loading_s, self._loading_since = self.loading_s(), None

    async def _reset(self, host: HostProcess) -> Observation:
        assert self._task is not None
        task = asdict(self._task)
        answer = await self._call(host, "reset", task=task, seed=self._seed, options=self._options)
        self.replayable = bool(answer.get("replayable"))
        host.replayable = host.replayable and self.replayable
        return _observation(answer.get("observation"))

    async def _step(self, host: HostProcess, action: str) -> StepResult:
        answer = await self._call(host, "step", action=action)
        reward = answer.get("reward")
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise WorldError(f"environment: step returned the reward {reward!r}, no finite number")
        return StepResult(
            _observation(answer.get("observation")),
            reward,
            done=bool(answer.get("done")),
            truncated=bool(answer.get("truncated")),
        )

    async def _call(self, host: HostProcess, op: str, **given: Any) -> dict[str, Any]:
        return await host.process.call(op, world=self._number, **given)


def _observation(raw: Any) -> Observation:
    """An observation that the job's code has sent."""
    try:
        return observation_of(raw)
    except (TypeError, ValueError, KeyError) as error:
        raise WorldError(f"environment: unreadable observation: {error}") from None
