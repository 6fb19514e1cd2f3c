"""Runs reward functions in child processes; one that hangs or crashes is replaced."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.code.frames import HEAD, frame
from paceline.errors import PacelineError
from paceline.fair_queue import NO_OWNER, FairQueue, QueueOwner
from paceline.isolation.process import ChildProcess
from paceline.plugins import RewardInput
from paceline.server.process_group import KILL_TIMEOUT_S, ProcessGroup, start_process_group
from paceline.telemetry.logs import Log
from paceline.types import Score
from paceline_reward.parts import RewardPart
from paceline_reward.scores import infra_error, item_to_json, score_from_json, timed_out

log = Log("pool")
MAX_CHUNK = 16
MAX_FRAME_BYTES = 4 << 20
_EXHAUSTED = f"exit code {-signal.SIGPROF}"


class BrokenChildError(PacelineError):
    """A child hung, died or sent an invalid answer; it has to be replaced."""


class ExhaustedChildError(BrokenChildError):
    """A child was ended by its own bound of CPU time (`paceline.rewards.bounded`)."""


Start = Callable[[], Awaitable[ChildProcess]]


def plain_children(import_from: Sequence[Path] = ()) -> Start:
    """Starts processes that may do what this one may: for functions that are installed."""
    command = (sys.executable, "-P", "-m", "paceline_reward.child", *map(str, import_from))

    async def start() -> ChildProcess:
        return _PlainChild(await start_process_group(command))

    return start


class ChildPool:
    """Children that `start` makes on first use; the slots of `queue` bound how many work."""

    def __init__(
        self,
        start: Start,
        queue: FairQueue,
        *,
        load_s: float = 60.0,
        keeps: Callable[[], bool] = lambda: True,
    ) -> None:
        """`keeps`: whether a child that has done its work may wait for more."""
        self.num_scored = 0
        self._start_process = start
        self._load_s = load_s
        self._keeps = keeps
        self._queue = queue
        self._idle: list[RewardChild] = []
        self._alive: set[RewardChild] = set()
        self._closed = False

    async def run(
        self, part: RewardPart, items: Sequence[RewardInput], *, owner: QueueOwner = NO_OWNER
    ) -> list[Score]:
        """Score items, in order; an item that cannot be scored gets an `infra_error`."""
        size = max(1, min(MAX_CHUNK, -(-len(items) // self._queue.slots)))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._score_chunk(part, items[start : start + size], owner))
                for start in range(0, len(items), size)
            ]
        return [score for task in tasks for score in task.result()]

    @property
    def num_alive(self) -> int:
        """Children that live."""
        return len(self._alive)

    async def end_idle(self) -> bool:
        """Kill a child that has nothing to do; whether there was one."""
        if not self._idle:
            return False
        child = self._idle.pop(0)
        self._alive.discard(child)
        await child.kill()
        return True

    async def close(self) -> None:
        """Kill all children, and start no more."""
        self._closed = True
        await asyncio.gather(*(child.kill() for child in list(self._alive)))
        self._alive.clear()
        self._idle.clear()

    async def _score_chunk(
        self, part: RewardPart, items: Sequence[RewardInput], owner: QueueOwner
    ) -> list[Score]:
        scores: list[Score] = []
        while len(scores) < len(items):
            async with self._queue.slot(owner):
                scores += await self._attempt(part, items[len(scores) :])
        return scores

    async def _attempt(self, part: RewardPart, items: Sequence[RewardInput]) -> list[Score]:
        """Score up to and including the first item that breaks the child; at least one item."""
        try:
            child = self._idle.pop() if self._idle else await self._start()
        except (OSError, PacelineError) as error:
            return [infra_error(f"cannot start a scorer process: {error}")] * len(items)
        scores: list[Score] = []
        intact = False
        try:
            await child.start_chunk(part, items, load_s=self._load_s)
            while len(scores) < len(items):
                scores.append(await child.next(part.timeout_s))
                self.num_scored += 1
            intact = True
        except UnloadableError as error:
            intact = True
            return [infra_error(error.message)] * len(items)
        except BrokenChildError as error:
            log.warning("scorer process replaced", part=part.name, target=part.target, error=error)
            # A child that broke during the import fails all items alike.
            count = 1 if child.loaded else len(items)
            is_answers_fault = child.loaded and isinstance(error, ExhaustedChildError)
            failed = timed_out if is_answers_fault else infra_error
            return scores + [failed(error.message)] * count
        finally:
            if intact and self._keeps():
                self._idle.append(child)
            else:
                self._alive.discard(child)
                await child.kill()
        return scores

    async def _start(self) -> RewardChild:
        child = RewardChild(await self._start_process())
        if self._closed:
            await child.kill()
            raise PacelineError("the job is over")
        self._alive.add(child)
        return child


class _PlainChild:
    """A process in a session of its own."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        assert group.process.stdin is not None
        assert group.process.stdout is not None
        self._stdin, self.stdout = group.process.stdin, group.process.stdout

    def write(self, data: bytes) -> None:
        """See `ChildProcess`."""
        self._stdin.write(data)

    async def exit_text(self) -> str:
        """See `ChildProcess`."""
        return f"exit code {await self._group.process.wait()}"

    async def kill(self) -> None:
        """See `ChildProcess`."""
        await self._group.kill()


class UnloadableError(PacelineError):
    """The function cannot be imported; the child itself is intact."""


class RewardChild:
    """One child process, working on at most one chunk at a time."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self.loaded = False

    async def start_chunk(
        self, part: RewardPart, items: Sequence[RewardInput], *, load_s: float
    ) -> None:
        """Send a chunk; returns when the function is imported.

        Raises:
            UnloadableError: the function cannot be imported.
            BrokenChildError: the child hung or died during the import.
        """
        self.loaded = False
        request = {
            "target": part.target,
            "options": part.options,
            "timeout_s": part.timeout_s,
            "load_s": load_s,
            "items": [item_to_json(item) for item in items],
        }
        # No drain: chunks are small, and a dead child is noticed by reading.
        self._process.write(frame(request))
        answer = await self._receive(load_s)
        if "failed" not in answer:
            raise BrokenChildError(f"unreadable answer: {answer}")
        if answer["failed"]:
            raise UnloadableError(str(answer["failed"]))
        self.loaded = True

    async def next(self, timeout_s: float) -> Score:
        """The score of the next item.

        Raises:
            BrokenChildError: the child hung or died during the item.
        """
        try:
            return score_from_json(await self._receive(timeout_s))
        except TypeError as error:
            raise BrokenChildError(f"unreadable answer: {error}") from None

    async def kill(self) -> None:
        """Kill the child and all processes that it has started."""
        await self._process.kill()

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        reader = self._process.stdout
        try:
            async with asyncio.timeout(timeout_s):
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                if size > MAX_FRAME_BYTES:
                    raise BrokenChildError(f"answered with {size} bytes")
                body = await reader.readexactly(size)
        except TimeoutError:
            raise BrokenChildError(f"no score within {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            how = await self._exit_text()
            kind = ExhaustedChildError if how == _EXHAUSTED else BrokenChildError
            raise kind(f"the scorer process died ({how})") from None
        # User code in the child can write to the pipe.
        try:
            return dict(json.loads(body))
        except (TypeError, ValueError, RecursionError) as error:
            raise BrokenChildError(f"unreadable answer: {error}") from None

    async def _exit_text(self) -> str:
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                return await self._process.exit_text()
        except TimeoutError:
            return "its pipe is closed"
