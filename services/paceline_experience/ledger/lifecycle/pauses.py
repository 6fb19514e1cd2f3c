"""Pauses of a job: nothing is leased or trained, and the job's clock stands still.

`LedgerMeta.paused` says how far a pause has come. With `draining` workers give back what they have
on lease and the trainer ends after a checkpoint; with `held` none of them is left, and no time
passes. The next trainer may start once the job is resumed, but nothing is leased before its first
version: rollout workers have no weights until then.
"""

from __future__ import annotations

from paceline.enums import StopReason
from paceline.errors import StateError
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.evaluation.evals import Evals
from paceline_experience.ledger.leases import Leases
from paceline_experience.ledger.records import DRAINING, HELD


class Pauses:
    """The ledger's operations for pausing a job; each may be repeated."""

    def __init__(self, *, core: LedgerContext, leases: Leases, evals: Evals) -> None:
        self._core = core
        self._leases = leases
        self._evals = evals

    @property
    def begun(self) -> bool:
        """Whether nothing is leased: the job is paused, or resumed but without weights."""
        return bool(self._core.state.meta.paused)

    @property
    def stop(self) -> StopReason | None:
        """Why there is no further batch; None: there is one."""
        return self._core.state.stop

    @property
    def is_started(self) -> bool:
        """Whether there has been a version; a store that was rolled back may have lost it."""
        return self._core.state.meta.started is not None

    @property
    def over(self) -> bool:
        """Whether a version is there that can be sampled with."""
        return self.is_started and not self.begun

    @property
    def held(self) -> bool:
        """Whether the job's clock stands still."""
        return self._core.state.meta.paused == HELD

    async def begin(self) -> None:
        """Lease nothing more, recall what is leased, and let the trainer end.

        Raises:
            StateError: the job is about to end.
        """
        async with self._core.transaction() as state:
            if state.stop not in (None, StopReason.PAUSED) or state.closed:
                raise StateError(f"job {self._core.job_id} is about to end: it cannot be paused")
            if state.stop is None or not state.meta.paused:
                paused = state.meta.paused or DRAINING
                await self._core.note(stop=StopReason.PAUSED, paused=paused)
        self._leases.mode.recall()
        self._core.ready.fire()
        self._core.work.fire()

    async def hold(self) -> None:
        """No worker is left: requeue what they had, with its progress, and stop the clock."""
        if self.held:
            return
        await self._leases.return_all()
        async with self._core.transaction() as state:
            if state.stop is StopReason.PAUSED:
                await self._core.note(paused=HELD, clock=self._core.clock.now())
                self._core.clock.hold()

    async def admit_trainer(self) -> None:
        """Inside a transaction, for a job that is not paused: its next trainer gets batches."""
        if self._core.state.stop is StopReason.PAUSED:
            await self._core.note(stop="", stop_reason="")

    async def published(self) -> bool:
        """A version is there again, so leases go on; whether they had to wait for it.

        An evaluation that the pause has interrupted begins again on this version, since no worker
        has the older one any more; one of a job that trains nothing goes on.
        """
        async with self._core.transaction() as state:
            if not state.meta.paused or state.stop is StopReason.PAUSED:
                return False
            if self._core.spec.trains:
                await self._evals.begin_anew()
            self._core.clock.go_on()
            await self._core.note(paused="", clock=self._core.clock.now())
        return True
