"""Runs reward functions in child processes; one that hangs or crashes is replaced."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from paceline.errors import PacelineError
from paceline.isolation.calls import CallError, Calls, EndedError
from paceline.isolation.pool import ProcessPool
from paceline.isolation.process import ChildProcess, PlainProcess, command
from paceline.platform.fair_queue import NO_OWNER, FairQueue, QueueOwner
from paceline.platform.telemetry.logs import Log
from paceline.plugins import RewardInput
from paceline.types import Score
from paceline_reward.parts import RewardPart
from paceline_reward.scores import (
    MAX_JSON_BYTES,
    infra_error,
    item_to_json,
    score_from_json,
    timed_out,
)

log = Log("pool")
MAX_CHUNK = 16
_EXHAUSTED = f"exit code {-signal.SIGPROF}"


class BrokenChildError(PacelineError):
    """A child hung, died or sent an invalid answer; it has to be replaced."""

    def __init__(self, message: str, *, loaded: bool = False, exhausted: bool = False) -> None:
        """`loaded`: the function had been imported.

        `exhausted`: it was ended by its own bound of CPU time (`paceline.rewards.bounded`).
        """
        super().__init__(message)
        self.loaded = loaded
        self.exhausted = exhausted


Start = Callable[[], Awaitable[ChildProcess]]


def plain_children(import_from: Sequence[Path] = ()) -> Start:
    """Starts processes that may do what this one may: for functions that are installed."""
    return partial(PlainProcess.start, command("paceline_reward.child", *map(str, import_from)))


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
        self._load_s = load_s
        self._queue = queue

        async def calls() -> Calls:
            died = "the scorer process died"
            return Calls(await start(), most_bytes=MAX_JSON_BYTES, ended=died)

        self._children = ProcessPool(calls, keeps=keeps, over="the job is over")
        self.end_idle = self._children.end_idle
        self.close = self._children.close

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
        return self._children.num_alive

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
        scores: list[Score] = []
        try:
            async with self._children.taken() as child:
                await self._score(child, part, items, scores)
        except BrokenChildError as error:
            log.warning("scorer process replaced", part=part.name, target=part.target, error=error)
            # A child that broke during the import fails all items alike.
            count = 1 if error.loaded else len(items)
            failed = timed_out if error.loaded and error.exhausted else infra_error
            return scores + [failed(error.message)] * count
        except (OSError, PacelineError) as error:
            return [infra_error(f"cannot start a scorer process: {error}")] * len(items)
        return scores

    async def _score(
        self, child: Calls, part: RewardPart, items: Sequence[RewardInput], scores: list[Score]
    ) -> None:
        """Add the scores of items to `scores`; if the function cannot be imported, errors.

        Raises:
            BrokenChildError: the child hung, died or has answered something else.
        """
        chunk = {
            "target": part.target,
            "options": part.options,
            "timeout_s": part.timeout_s,
            "load_s": self._load_s,
            "items": [item_to_json(item) for item in items],
        }
        loaded, limit_s = False, self._load_s
        try:
            async with child.stream("score", chunk) as answers:
                async with asyncio.timeout(limit_s):
                    await answers.next()
                loaded, limit_s = True, part.timeout_s
                while len(scores) < len(items):
                    async with asyncio.timeout(limit_s):
                        answer = await answers.next()
                    scores.append(score_from_json(answer.fields))
                    self.num_scored += 1
        except CallError as error:
            if loaded:  # only the import may fail
                raise BrokenChildError(f"unreadable answer: {error}", loaded=True) from None
            scores += [infra_error(error.message)] * len(items)
        except TimeoutError:
            raise BrokenChildError(f"no score within {limit_s:g} s", loaded=loaded) from None
        except TypeError as error:
            raise BrokenChildError(f"unreadable answer: {error}", loaded=loaded) from None
        except EndedError as error:
            exhausted = error.how == _EXHAUSTED
            raise BrokenChildError(error.message, loaded=loaded, exhausted=exhausted) from None
