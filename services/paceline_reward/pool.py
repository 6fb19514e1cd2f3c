"""Child processes for user code: a child that hangs or crashes is replaced, others go on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.family import END_S, Family, start_family
from paceline.interfaces import RewardInput
from paceline.logs import Log
from paceline.types import Score
from paceline_reward.child import HEAD, frame
from paceline_reward.parts import Part
from paceline_reward.scores import infra_error, item_to, score_from
from paceline_reward.turns import NOBODY, Owner, Turns

log = Log("pool")
MAX_CHUNK = 16
MAX_FRAME_BYTES = 4 << 20


class BrokenChildError(PacelineError):
    """A child hung, died or spoke nonsense; it has to be replaced."""


class Pool:
    """At most `processes` children, each made when it is first needed."""

    def __init__(
        self, *, processes: int, import_from: Sequence[Path] = (), load_s: float = 60.0
    ) -> None:
        self._processes = processes
        self.num_scored = 0
        self._import_from = [str(path) for path in import_from]
        self._load_s = load_s
        self._turns = Turns(processes)
        self._idle: list[Child] = []
        self._alive: set[Child] = set()

    async def run(
        self, part: Part, items: Sequence[RewardInput], *, owner: Owner = NOBODY
    ) -> list[Score]:
        """One score for each item, in order; it never raises for the sake of an item."""
        size = max(1, min(MAX_CHUNK, -(-len(items) // self._processes)))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._chunk(part, items[start : start + size], owner))
                for start in range(0, len(items), size)
            ]
        return [score for task in tasks for score in task.result()]

    async def close(self) -> None:
        """Kill all children."""
        await asyncio.gather(*(child.kill() for child in list(self._alive)))
        self._alive.clear()
        self._idle.clear()

    async def _chunk(self, part: Part, items: Sequence[RewardInput], owner: Owner) -> list[Score]:
        scores: list[Score] = []
        while len(scores) < len(items):
            async with self._turns.place(owner):
                scores += await self._attempt(part, items[len(scores) :])
        return scores

    async def _attempt(self, part: Part, items: Sequence[RewardInput]) -> list[Score]:
        """Scores up to and with the first item that breaks the child; at least one."""
        try:
            child = self._idle.pop() if self._idle else await self._start()
        except OSError as error:
            return [infra_error(f"cannot start a scorer process: {error}")] * len(items)
        scores: list[Score] = []
        whole = False
        try:
            await child.begin(part, items, load_s=self._load_s)
            while len(scores) < len(items):
                scores.append(await child.next(part.timeout_s))
                self.num_scored += 1
            whole = True
        except UnloadableError as error:
            whole = True
            return [infra_error(error.message)] * len(items)
        except BrokenChildError as error:
            log.warning("scorer broke", part=part.name, target=part.target, error=error)
            # Nobody can say which item broke a child that did not get through its import.
            count = 1 if child.loaded else len(items)
            return scores + [infra_error(error.message)] * count
        finally:
            if whole:
                self._idle.append(child)
            else:
                self._alive.discard(child)
                await child.kill()
        return scores

    async def _start(self) -> Child:
        command = (sys.executable, "-P", "-m", "paceline_reward.child", *self._import_from)
        child = Child(await start_family(command))
        self._alive.add(child)
        return child


class UnloadableError(PacelineError):
    """The function cannot be imported; the child is fine."""


class Child:
    """One child process, working on at most one chunk at a time."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._process = family.process
        self.loaded = False

    async def begin(self, part: Part, items: Sequence[RewardInput], *, load_s: float) -> None:
        """Hand over a chunk; returns when the function is imported.

        Raises:
            UnloadableError: it cannot be imported.
            BrokenChildError: the child hung or died over it.
        """
        self.loaded = False
        request = {
            "target": part.target,
            "options": part.options,
            "timeout_s": part.timeout_s,
            "load_s": load_s,
            "items": [item_to(item) for item in items],
        }
        assert self._process.stdin is not None
        # No drain: a child that died is noticed by reading, and chunks are small.
        self._process.stdin.write(frame(request))
        answer = await self._receive(load_s)
        if "failed" not in answer:
            raise BrokenChildError(f"unreadable answer: {answer}")
        if answer["failed"]:
            raise UnloadableError(str(answer["failed"]))
        self.loaded = True

    async def next(self, timeout_s: float) -> Score:
        """The score of the next item.

        Raises:
            BrokenChildError: the child hung or died over it.
        """
        try:
            return score_from(await self._receive(timeout_s))
        except TypeError as error:
            raise BrokenChildError(f"unreadable answer: {error}") from None

    async def kill(self) -> None:
        """End it and everything it has started."""
        await self._family.kill()

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        reader = self._process.stdout
        assert reader is not None
        try:
            async with asyncio.timeout(timeout_s):
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                if size > MAX_FRAME_BYTES:
                    raise BrokenChildError(f"answered with {size} bytes")
                body = await reader.readexactly(size)
        except TimeoutError:
            raise BrokenChildError(f"no score within {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise BrokenChildError(
                f"the scorer process died ({await self._last_words()})"
            ) from None
        # Code of the user's runs beside the pipe and could have written to it.
        try:
            return dict(json.loads(body))
        except (TypeError, ValueError, RecursionError) as error:
            raise BrokenChildError(f"unreadable answer: {error}") from None

    async def _last_words(self) -> str:
        try:
            async with asyncio.timeout(END_S):
                return f"exit code {await self._process.wait()}"
        except TimeoutError:
            return "it closed its pipe"
