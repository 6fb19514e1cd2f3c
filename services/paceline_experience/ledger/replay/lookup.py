"""Finds tasks by their ids, which are digests of content and say nothing of a position."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import DeadlineError, InvalidError, UnavailableError, plugin_boundary
from paceline.platform.digest import number
from paceline.platform.telemetry.logs import Log
from paceline.plugins import FindsTasks, TaskSource
from paceline_experience.ledger.sources import NoTasks

log = Log("replay")
MAX_SCANNED = 1_000_000
"""Tasks of a source without `position_of` that are looked through."""
_SLICE = 128  # tasks made in one piece of work: tens of milliseconds, and then it can be cancelled
_WAIT_S = 5.0  # a call has 10 s from the gateway, which repeats none that ends with this deadline
_MOST_ALIKE = 16  # places with the same digest that are looked at


@dataclass(frozen=True, slots=True)
class _Scanned:
    """Digests of all ids in ascending order, and the position of each: 12 bytes a task."""

    digests: Any  # (num_tasks,) uint64
    positions: Any  # (num_tasks,) uint32

    def places(self, task_id: str) -> list[int]:
        """Positions whose id has the digest of this one, the first ones first."""
        digest = np.uint64(number(task_id))
        first = int(np.searchsorted(self.digests, digest))
        alike = slice(first, first + _MOST_ALIKE)
        found = self.positions[alike][self.digests[alike] == digest]
        return [int(each) for each in found]


class TaskLookup:
    """Asks the source of a job, or looks through it once, and answers from memory from then on."""

    def __init__(self, tasks: TaskSource, *, job_id: str, wait_s: float = _WAIT_S) -> None:
        """`wait_s`: how long a call waits for what goes on without it."""
        self._tasks: TaskSource = tasks
        self._job_id, self._wait_s = job_id, wait_s
        self._scan: asyncio.Task[_Scanned] | None = None
        self._num_scanned = 0

    async def positions(self, task_ids: Collection[str]) -> dict[str, int]:
        """The positions of these tasks; ids that are none of the job's are left out.

        Raises:
            InvalidError: the source cannot tell, and has too many tasks to look through.
            DeadlineError: it is being looked through, which goes on; repeat the call.
            UnavailableError: the ledger was closed meanwhile.
        """
        if not task_ids:
            return {}
        if isinstance(self._tasks, FindsTasks):
            return await asyncio.to_thread(self._found, task_ids, self._asked)
        return await asyncio.to_thread(self._found, task_ids, (await self._scanned()).places)

    def close(self) -> None:
        """Look through nothing any more."""
        if self._scan is not None:
            self._scan.cancel()

    def let_go(self) -> None:
        """The job is over: from now on it has no tasks."""
        self._tasks = NoTasks()

    async def _scanned(self) -> _Scanned:
        if self._scan is None:
            size = len(self._tasks)
            if size > MAX_SCANNED:
                raise InvalidError(
                    f"the job has {size} tasks: at most {MAX_SCANNED} are looked through for the "
                    "`task_id` of a line, unless their source has a `position_of`"
                )
            self._scan = asyncio.create_task(self._look_through(size), name="task ids")
        await asyncio.wait({self._scan}, timeout=self._wait_s)
        if not self._scan.done():
            raise DeadlineError(
                f"the job's tasks are being looked through ({self._num_scanned} of "
                f"{len(self._tasks)}); import again in a moment"
            )
        if self._scan.cancelled():
            raise UnavailableError("the job was closed meanwhile; import again")
        return self._scan.result()

    async def _look_through(self, size: int) -> _Scanned:
        digests = np.zeros(size, np.uint64)  # 0 where a task cannot be made
        num_failed = 0
        for start in range(0, size, _SLICE):
            ids = await asyncio.to_thread(self._ids, range(start, min(start + _SLICE, size)))
            digests[start : start + len(ids)] = [
                0 if each is None else number(each) for each in ids
            ]
            num_failed += ids.count(None)
            self._num_scanned = start + len(ids)
        if num_failed:
            log.warning("tasks that cannot be made are left out", job=self._job_id, num=num_failed)
        order = await asyncio.to_thread(np.argsort, digests, kind="stable")
        return _Scanned(digests[order], order.astype(np.uint32))

    def _ids(self, positions: Iterable[int]) -> list[str | None]:
        return [self._id_at(each) for each in positions]

    def _found(
        self, task_ids: Collection[str], places: Callable[[str], Iterable[int]]
    ) -> dict[str, int]:
        """The first place of each where the task with this id is."""
        found = dict[str, int]()
        for task_id in task_ids:
            at = (each for each in places(task_id) if self._id_at(each) == task_id)
            if (position := next(at, None)) is not None:
                found[task_id] = position
        return found

    def _asked(self, task_id: str) -> list[int]:
        tasks = self._tasks
        if not isinstance(tasks, FindsTasks):  # let go meanwhile
            return []
        try:
            with plugin_boundary():
                position = tasks.position_of(task_id)
                return [] if position is None or not 0 <= position < len(tasks) else [position]
        except InvalidError as error:
            log.warning("position_of has failed", job=self._job_id, error=error)
            return []

    def _id_at(self, position: int) -> str | None:
        """None: there is no task, for one because its row has changed."""
        try:
            with plugin_boundary():
                return self._tasks[position].task_id
        except InvalidError as error:
            log.debug("a task cannot be made", job=self._job_id, position=position, error=error)
            return None
