"""Decides when a job is over and brings it to its end."""

from __future__ import annotations

from paceline.enums import DropReason, StopReason
from paceline.platform.telemetry.logs import Log
from paceline_experience.ledger.admission import over_budget
from paceline_experience.ledger.batches import Batches
from paceline_experience.ledger.context import Hooks, LedgerContext
from paceline_experience.ledger.evaluation.evals import Evals
from paceline_experience.ledger.groups import Groups
from paceline_experience.ledger.leases import Leases
from paceline_experience.ledger.lifecycle.conditions import Conditions
from paceline_experience.ledger.state import LedgerState

_MIN_LAST_VERSION_TIMEOUT_S = 120.0  # for the last version to be published and served
# A job fails when so many groups in a row could not be run: no chance, even if most tasks are bad.
_MIN_INVALID_RUN = 64
_INVALID_BATCHES = 8
log = Log("ending")
_REASONS = {
    "steps": "all steps are done",
    "eval_reward": "the eval reward is reached",
    "wall_s": "the time is over",
    "tasks": "all epochs of the tasks are over",
    "measured": "all tasks are measured",
}
_NEEDS_A_STEP = ("wall_s", "tasks")
"""What ends a job without having been asked for: it is no success if nothing was trained."""


class JobCompletion:
    """Stop conditions, the last eval, and the end of the job, reported once."""

    def __init__(
        self,
        *,
        core: LedgerContext,
        groups: Groups,
        leases: Leases,
        batches: Batches,
        evals: Evals,
        hooks: Hooks,
    ) -> None:
        self._core = core
        self._groups = groups
        self._leases = leases
        self._batches = batches
        self._evals = evals
        self._hooks = hooks
        self._conditions = Conditions(core)

    async def cancel(self) -> None:
        """Drop everything untrained, and train nothing more."""
        reason = StopReason.CANCELLED
        async with self._core.transaction() as state:
            await self._core.note(stop=reason, stop_reason=reason)
            await self._drop_untrained(state, DropReason.CANCELLED, taken=True)
        await self._batches.release()
        await self._forget_stored()
        self._core.ready.fire()
        self._core.work.fire()

    async def _forget_stored(self) -> None:
        async with self._core.transaction():
            await self._groups.forget_stored()

    async def trainer_informed(self, stop: StopReason | None) -> None:
        """The trainer has received `stop`; after `finished` its newest version is the last one."""
        if stop is StopReason.FINISHED and not self._core.state.meta.told:
            async with self._core.transaction():
                await self._core.note(told=True)

    async def check(self) -> None:
        """Start to finish when a stop condition holds; fail when the job cannot go on."""
        if self._core.state.stop:
            return
        if self._over_budget() and await self._batches.release():
            log.warning(
                "experience.payload_bytes is full: only the newest checkpoint can be rewound to",
                job=self._core.job_id,
                step=self._core.state.meta.durable,
            )
        problem = self._fatal_problem()
        if problem:
            await self._fail(problem)
            return
        if (met := await self._conditions.met()) is not None:
            condition, watch, text = met
            if condition.end == "failed":
                await self._fail(f"stop.when: {text}", watch=watch)
            else:
                await self._begin_to_finish("when", problem=text, watch=watch)
        elif reason := self._stop_condition():
            await self._begin_to_finish(reason)

    async def _begin_to_finish(self, reason: str, **fields: object) -> None:
        async with self._core.transaction() as state:
            if state.stop:  # stopped meanwhile
                return
            now = self._core.clock.now()
            await self._core.note(
                stop=StopReason.FINISHED, stop_reason=reason, stop_at=now, told=False, **fields
            )
            await self._drop_untrained(state, DropReason.SURPLUS, taken=False)
        self._core.ready.fire()

    async def advance(self) -> None:
        """Finish once the last version is published and measured."""
        state = self._core.state
        if state.meta.done:
            return
        if state.meta.stop_reason == "failed":  # begun before a restart or an error
            await self._finish("failed", state.meta.problem)
            return
        if state.stop is not StopReason.FINISHED:
            return
        last = state.versions.get(state.version)
        told = state.meta.told or not self._core.spec.trains
        is_last = told and last is not None and last.step == state.step
        if not is_last and not self._timed_out(state):
            return
        if self._evals.run:
            return
        reason = _REASONS.get(state.meta.stop_reason, state.meta.problem)
        if last is not None and last.version in state.meta.withdrawn:
            reason += f"; no rollout worker accepts version {last.version}, the last one"
        elif last is not None and not self._evals.measured(last.version):
            await self._evals.start()
            return
        if not self._core.spec.trains and (names := self._evals.nothing_measured()):
            await self._finish("failed", self._nothing_measured(names))
        elif not state.step and state.meta.stop_reason in _NEEDS_A_STEP:
            await self._finish("failed", self._nothing_trained(reason))
        else:
            await self._finish("succeeded", reason)

    def _nothing_measured(self, names: str) -> str:
        detail = self._core.state.meta.invalid_detail
        told = f", the last one: {detail}" if detail else ""
        return f"{names}: no task could be measured (`tasks`, `options`, `timeout_s`){told}"

    def _nothing_trained(self, reason: str) -> str:
        wanted = self._core.spec.experience.batch_groups
        return (
            f"{reason}, and nothing was trained: a step needs {wanted} groups "
            "(experience.batch_groups); lower it, or give more tasks, tasks.epochs or stop.wall_s; "
            "`filtered` and `dropped` of the job count what was not usable"
        )

    async def _finish(self, outcome: str, reason: str) -> None:
        async with self._core.transaction() as state:
            await self._core.note(closed=True)
            await self._drop_untrained(state, DropReason.SURPLUS, taken=True)
        await self._batches.release()
        await self._forget_stored()
        await self._hooks.finished(state=outcome, reason=reason)
        async with self._core.transaction():
            await self._core.note(done=True)

    async def fail(self, reason: str) -> None:
        """Drop everything untrained; `advance` then reports the failure until that succeeds."""
        async with self._core.transaction() as state:
            await self._begin_to_fail(reason)
            await self._drop_untrained(state, DropReason.CANCELLED, taken=True)
        self._core.ready.fire()
        self._core.work.fire()

    async def _fail(self, reason: str, **fields: object) -> None:
        async with self._core.transaction() as state:
            if state.stop:
                return
            await self._begin_to_fail(reason, **fields)
        self._core.ready.fire()
        await self._finish("failed", reason)

    async def _begin_to_fail(self, reason: str, **fields: object) -> None:
        await self._core.note(
            stop=StopReason.CANCELLED, stop_reason="failed", problem=reason, done=False, **fields
        )

    def _timed_out(self, state: LedgerState) -> bool:
        eval_timeouts = [each.timeout_s for each in self._core.spec.eval_sets.values()]
        timeout_s = max(_MIN_LAST_VERSION_TIMEOUT_S, *eval_timeouts, 0.0)
        return self._core.clock.now() - state.meta.stop_at > timeout_s

    def _stop_condition(self) -> str:
        state, stop = self._core.state, self._core.spec.stop
        if not self._core.spec.trains:
            over = state.version >= 0 and self._evals.measured(state.version)
            return "measured" if over and not self._evals.run else ""
        if state.step >= stop.steps:
            return "steps"
        reached = self._evals.reward
        if stop.eval_reward is not None and reached is not None and reached >= stop.eval_reward:
            return "eval_reward"
        now = self._core.clock.now()
        started = now if state.meta.started is None else state.meta.started
        if stop.wall_s is not None and now - started >= stop.wall_s:
            return "wall_s"
        return "tasks" if self._tasks_exhausted(state) else ""

    def _tasks_exhausted(self, state: LedgerState) -> bool:
        if not self._core.cursor.exhausted or state.open or state.step in state.batches:
            return False
        return len(state.ready) < self._core.spec.experience.batch_groups

    def _fatal_problem(self) -> str:
        """Why the job cannot go on; empty if it can."""
        if problem := self._core.problem or self._groups.problem or self._batches.problem:
            return problem
        state, spec = self._core.state, self._core.spec.experience
        invalid, ended = state.counts["groups:invalid"], state.counts["groups:ended"]
        exhausted = self._core.cursor.exhausted
        all_bad = 0 < invalid == ended and not state.open
        if invalid == ended >= 2 * spec.batch_groups or (all_bad and exhausted):
            return state.meta.invalid_detail or "no task could be run"
        run = state.counts["groups:invalid_run"]
        if run >= max(_MIN_INVALID_RUN, _INVALID_BATCHES * spec.batch_groups):
            return f"the last {run} tasks could not be run: {state.meta.invalid_detail}"
        stuck = self._batches.waiting and not state.open
        if stuck and self._over_budget():
            return (
                f"experience.payload_bytes: {spec.payload_bytes} is full and no batch is ready; "
                "raise it or write checkpoints more often"
            )
        return ""

    def _over_budget(self) -> bool:
        return over_budget(self._leases.limits, self._leases.load())

    async def _drop_untrained(self, state: LedgerState, reason: DropReason, *, taken: bool) -> None:
        states = "qlfrt" if taken else "qlfr"
        names = [
            name
            for name, group in state.groups.items()
            if not group.remaining.strip(states) and (taken or not group.is_eval)
        ]
        await self._groups.drop(names, reason)
        for step, batch in [*state.batches.items()]:
            if not all(name in state.groups for name in batch.groups):
                del state.batches[step]
        if taken and state.meta.eval:
            await self._evals.abandon()
