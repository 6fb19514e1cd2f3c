"""The published versions, and what rollout workers say of them.

A version is accepted once a worker serves it, and withdrawn once all workers refuse it: nobody is
routed to it any more, and the trainer publishes its weights again, as another version. A version
that is replaced before either is so has no verdict, and needs none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from paceline.errors import StateError
from paceline.platform.telemetry.logs import Log
from paceline.types import PolicyVersion, WeightRefusal
from paceline_experience.ledger.batches import fence
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.evaluation.evals import Evals

MAX_WITHDRAWN = 3
"""Versions withdrawn in a row, without an accepted one in between, until the job fails."""
log = Log("versions")


class Versions:
    """All publications of a job, the newest accepted one, and those withdrawn since."""

    def __init__(
        self, *, core: LedgerContext, evals: Evals, fail: Callable[[str], Awaitable[None]]
    ) -> None:
        self._core = core
        self._evals = evals
        self._fail = fail

    def listed(self) -> list[PolicyVersion]:
        """All publications, in order."""
        return [found.policy_version() for _, found in sorted(self._core.state.versions.items())]

    async def of_step(self, step: int, *, incarnation: int) -> PolicyVersion | None:
        """What this incarnation has published for a step; None: nothing yet, or it is withdrawn.

        Raises:
            StateError: it has published a later step.
        """
        async with self._core.transaction() as state:
            fence(state, incarnation)
            last = state.versions.get(state.version)
        if last is None or last.incarnation != incarnation or last.step < step:
            return None
        if last.step > step:
            raise StateError(f"step {step} was to be seeded, but {last.step} is published")
        return None if last.version in self.withdrawn else last.policy_version()

    @property
    def accepted(self) -> int:
        """The newest version that a worker has served; -1: none."""
        return self._core.state.meta.accepted

    @property
    def withdrawn(self) -> tuple[int, ...]:
        """Versions after the accepted one that all workers have refused."""
        return self._core.state.meta.withdrawn

    async def hear(
        self, *, serving: Iterable[int], refusals: Sequence[WeightRefusal | None]
    ) -> None:
        """The versions that workers serve, and what each worker refuses (None: nothing).

        May be repeated: what a restart has left undone is done then.
        """
        async with self._core.transaction() as state:
            await self._accept(max((v for v in serving if v <= state.version), default=-1))
            if _refused_by_all(state.version, refusals):
                await self._withdraw(state.version)
            if (run := self._evals.run) is not None and run.version in state.meta.withdrawn:
                await self._evals.begin_anew()
            version, withdrawn = state.version, state.meta.withdrawn
            # Weights that nobody trains would be the same ones again.
            most = MAX_WITHDRAWN if self._core.spec.trains else 1
            failed = version in withdrawn[most - 1 :] and not state.stop
        reasons = [each.reason for each in refusals if each is not None]
        if failed and reasons:
            await self._fail(
                f"{reasons[0]}; all rollout workers refuse version {version}, and have refused "
                f"the {len(withdrawn) - 1} before it"
            )

    async def _accept(self, version: int) -> None:
        meta = self._core.state.meta
        if version > meta.accepted:
            left = tuple(each for each in meta.withdrawn if each > version)
            await self._core.note(accepted=version, withdrawn=left)

    async def _withdraw(self, version: int) -> None:
        meta = self._core.state.meta
        if version <= meta.accepted or version in meta.withdrawn:
            return
        await self._core.note(withdrawn=(*meta.withdrawn, version))
        log.error("all workers refuse a version", job=self._core.job_id, version=version)
        self._core.ready.fire()


def _refused_by_all(version: int, refusals: Sequence[WeightRefusal | None]) -> bool:
    each_refuses = (each is not None and each.version == version for each in refusals)
    return bool(refusals) and all(each_refuses)
