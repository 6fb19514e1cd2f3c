"""Does what waits for a job's own code outside of transactions, so that its ledger goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from paceline.errors import PacelineError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline_experience.ledger.advantages.estimator import Estimator, FixedEstimate, Inputs
from paceline_experience.ledger.state import GroupRecord, LedgerState
from paceline_experience.store.payloads import PayloadStore
from paceline_experience.store.signal import Signal

_RETRY_S = 1.0
log = Log("own-code")


@dataclass(frozen=True, slots=True)
class Undecided:
    """A group, and its episodes that have finished since it was last decided on, in order."""

    group: GroupRecord
    new: tuple[int, ...] = ()


class LaterDecisions:
    """Groups that wait for their allocator or filters; one after the other is decided."""

    def __init__(self, decide: Callable[[Undecided], Awaitable[None]]) -> None:
        """`decide` asks them, then begins a transaction; what has changed is its to see."""
        self._decide = decide
        self._waiting: dict[str, Undecided] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, groups: Sequence[Undecided]) -> None:
        """Decide on these, in the background."""
        for each in groups:
            earlier = self._waiting.get(each.group.group_id, each).new
            new = tuple(dict.fromkeys((*earlier, *each.new)))
            self._waiting[each.group.group_id] = replace(each, new=new)
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="own decisions")

    def close(self) -> None:
        """Decide nothing more: what is undecided is found when the ledger is opened again."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._waiting:
            name = next(iter(self._waiting))
            undecided = self._waiting.pop(name)
            try:
                await self._decide(undecided)
            except Exception as error:  # the supervisor boundary of this job's decisions
                if not isinstance(error, PacelineError):
                    log.exception("a group cannot be decided on yet", group=name)
                else:
                    log.warning("a group cannot be decided on yet", group=name, error=error)
                newer = self._waiting.pop(name, undecided)
                self.add([undecided, newer])
                await asyncio.sleep(_RETRY_S)


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    groups: tuple[str, ...]
    task: asyncio.Task[FixedEstimate]


class LaterEstimate:
    """The advantages of the next batch, in the making."""

    def __init__(self, estimator: Estimator, payloads: PayloadStore, ready: Signal) -> None:
        """`ready` is fired when they are made."""
        self._estimator = estimator
        self._payloads = payloads
        self._ready = ready
        self._pending: _Pending | None = None

    async def of(
        self, chosen: Sequence[GroupRecord], step: int, state: LedgerState
    ) -> tuple[list[GroupRecord], FixedEstimate] | None:
        """Inside a transaction: the groups of the batch of a step, and its advantages.

        None: they are being made. The groups are those that were chosen when this began, as long as
        all of them can be trained.

        Raises:
            InvalidError: a plug-in has failed.
        """
        found = self._pending
        if found is None or found.step != step or not state.ready.issuperset(found.groups):
            self.forget()
            inputs = await self._estimator.gather(chosen, step, payloads=self._payloads)
            task = asyncio.create_task(self._made(inputs), name="own advantages")
            task.add_done_callback(lambda _: self._ready.fire())
            self._pending = _Pending(step, tuple(group.group_id for group in chosen), task)
            return None
        if not found.task.done():
            return None
        self._pending = None if found.task.exception() else found
        return [state.groups[name] for name in found.groups], found.task.result()

    def forget(self) -> None:
        """What it is made from holds no longer."""
        if self._pending is not None:
            self._pending.task.cancel()
            self._pending = None

    async def _made(self, inputs: Inputs) -> FixedEstimate:
        while True:
            try:
                return await self._estimator.compute(inputs)
            except UnavailableError as error:
                log.warning("advantages cannot be estimated yet", error=error)
                await asyncio.sleep(_RETRY_S)
