"""Which checkpoint of a job is the best, and which stay although there are newer ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.config import JobSpec
from paceline.types import CheckpointStatus
from paceline_experience.ledger.context import Hooks, LedgerContext
from paceline_experience.ledger.records import EvalRun, LedgerMeta, Publication
from paceline_experience.ledger.state import LedgerState


def evaluated(
    meta: LedgerMeta,
    spec: JobSpec,
    run: EvalRun,
    of: Publication | None,
    result: Mapping[str, Any],
) -> dict[int, float]:
    """The values that decide which checkpoint is the best, by step, after a run has ended.

    `of`: the version that the run has measured. One of a step that was trained again since says
    nothing about the checkpoint of that step.
    """
    best = spec.trainer.checkpoint.best
    needed = {k: v for k, v in meta.evaluated.items() if k in meta.checkpoints}
    newer = {k: v for k, v in meta.evaluated.items() if k > meta.checkpoint_step}
    found = needed | newer
    if best is None or run.name != (best.eval or spec.main_eval) or of is None:
        return found
    value = best.value(result)
    if value is not None and of.age_step == of.step:
        found[run.step] = value
    return found


def best_step(meta: LedgerMeta, spec: JobSpec) -> int | None:
    """Step of the best checkpoint, of equal ones the first; None: none is evaluated."""
    best = spec.trainer.checkpoint.best
    known = sorted(step for step in meta.checkpoints if step in meta.evaluated)
    if best is None or not known:
        return None
    sign = 1.0 if best.direction == "max" else -1.0
    return max(known, key=lambda step: sign * meta.evaluated[step])


def retained(state: LedgerState, spec: JobSpec, step: int) -> tuple[int, ...]:
    """Checkpoints that stay beside the newest ones, as of the one of `step`, ascending.

    The best one, and those whose evaluation has not ended.
    """
    known = {**state.meta.checkpoints, step: ""}
    meta = replace(state.meta, checkpoints=known)
    best = spec.trainer.checkpoint.best
    if best is None:
        return ()
    found = {best_step(meta, spec), *_open(state, best.eval or spec.main_eval)}
    return tuple(sorted(each for each in found if each in known))


def _open(state: LedgerState, name: str | None) -> list[int]:
    """Steps that an evaluation measures at this moment, or next."""
    run, newest = state.meta.eval, state.versions.get(state.version)
    found = [run.step] if run is not None and name in (run.name, *run.then) else []
    if newest is not None and name in state.meta.eval_due:
        found.append(newest.step)
    return found


class KeptCheckpoints:
    """Tells the rest of the service which checkpoints a job has, whenever that changes."""

    def __init__(self, core: LedgerContext, hooks: Hooks) -> None:
        self._core = core
        self._hooks = hooks
        self._reported: tuple[CheckpointStatus, ...] | None = None

    def listed(self) -> tuple[CheckpointStatus, ...]:
        """The checkpoints that exist, by step."""
        meta, spec = self._core.state.meta, self._core.spec
        best = best_step(meta, spec)
        return tuple(
            CheckpointStatus(
                step=step, digest=digest, value=meta.evaluated.get(step), best=step == best
            )
            for step, digest in sorted(meta.checkpoints.items())
        )

    async def report(self) -> None:
        """Call the hook, until it has succeeded once for the present list."""
        found = self.listed()
        if found != self._reported:
            await self._hooks.checkpoints(found)
            self._reported = found
