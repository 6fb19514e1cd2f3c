"""Held-out evals: runs of pinned episodes, outside admission and the identity."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.plugins import TaskSource
from paceline.progress import EvalOutcome, EvalProgress
from paceline.telemetry.logs import Log
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.groups import Groups
from paceline_experience.ledger.records import (
    EvalRun,
    EvalTotals,
    Publication,
    field_texts,
    record_text,
    row_text,
)
from paceline_experience.ledger.state import GroupRecord

MIN_MEASURED = 0.9
"""Share of an eval's tasks below which its result is reported as incomplete."""
log = Log("evals")
_RUN_STRIDE = 1 << 20  # scores of one run in the ring of measured trajectories


class Evals:
    """At most one run is open; what becomes due meanwhile runs next, on the newest version.

    A run has at most `limits.eval_window` episodes open: measured ones are added to its totals and
    make way for the next.
    """

    def __init__(
        self, *, core: LedgerContext, groups: Groups, eval_tasks: TaskSource | None
    ) -> None:
        self._core = core
        self._groups = groups
        self._spec = core.spec.eval
        self._window = core.limits.settings.eval_window
        self._size = 0
        if self._spec is not None and eval_tasks is not None:
            self._size = min(self._spec.tasks, len(eval_tasks))

    @property
    def run(self) -> EvalRun | None:
        """The open run."""
        return self._core.state.meta.eval

    @property
    def enabled(self) -> bool:
        """Whether this job has evals."""
        return self._size > 0

    def progress(self) -> EvalProgress | None:
        """Progress of the open run, for `live`; None: none is open."""
        run = self.run
        if run is None:
            return None
        groups = self._open_groups()
        measured = run.totals.measured + sum(g.states == "m" for g in groups)
        dropped = run.admitted - run.totals.measured - len(groups)
        return EvalProgress(
            version=run.version,
            step=run.step,
            total=run.total,
            measured=measured,
            open=run.total - measured - dropped,
        )

    def held_version(self) -> int:
        """The version at which eval workers are held; -1: none."""
        return self.run.version if self.run else -1

    async def on_publication(self, step: int) -> None:
        """A version of `step` was published: measure it if an eval is due."""
        if self._spec is None or not self.enabled:
            return
        if step % self._spec.every == 0 or step >= self._core.spec.stop.steps:
            await self.start()

    async def start(self) -> None:
        """Open a run on the newest version, or note that one is due if another is open."""
        async with self._core.transaction() as state:
            last = state.versions.get(state.version)
            if last is None or state.meta.eval_version == last.version:
                return
            if self.run is not None:
                if self.run.version != last.version:
                    await self._core.note(eval_due=True)
                return
            await self._open_run(last)
        self._core.work.fire()

    async def _open_run(self, last: Publication) -> None:
        assert self._spec is not None
        now = self._core.clock.now()
        run = EvalRun(
            version=last.version,
            step=last.step,
            total=self._size,
            since=now,
            deadline=now + self._spec.timeout_s,
        )
        await self._admit("open", run, limit=self._window, measured=[])

    async def _admit(
        self, command: str, run: EvalRun, *, limit: int, measured: Sequence[GroupRecord]
    ) -> None:
        """Admit up to `limit` more tasks of a run and remove its `measured` groups."""
        admitted = min(run.total, run.admitted + limit)
        positions = json.dumps([*range(run.admitted, admitted)])
        prefix = f"{self._core.job_id}.e{run.version}."
        gone = json.dumps([group.group_id for group in measured])
        record = record_text(replace(run, admitted=admitted))
        await self._core.change("evals", command, record, positions, prefix, gone)

    async def sweep(self) -> None:
        """Advance the run; close it when its tasks or its time are up; open one that is due."""
        async with self._core.transaction() as state:
            await self._advance()
            due = state.meta.eval_due and self.run is None
        if due:
            await self.start()

    async def _advance(self) -> None:
        run, now = self.run, self._core.clock.now()
        if run is None:
            return
        groups = self._open_groups()
        if not run.leased and (len(groups) < run.admitted or any(map(_is_started, groups))):
            # The timeout starts with the first lease: workers may still be starting.
            assert self._spec is not None
            run = replace(run, leased=True, deadline=now + self._spec.timeout_s)
            await self._core.note(eval=run)
        unfinished = run.admitted < run.total or any(g.states != "m" for g in groups)
        if now >= run.deadline or not unfinished:
            await self._close_run(run, groups)
        else:
            await self._refill(run, groups)

    async def _refill(self, run: EvalRun, groups: Sequence[GroupRecord]) -> None:
        """Refill the window, unless more than half of it is in use or all tasks are admitted."""
        measured = [g for g in groups if g.states == "m"]
        free = self._window - len(groups) + len(measured)
        if run.admitted == run.total or 2 * free < self._window:
            return
        await self._list(run, measured)
        run = replace(run, totals=_added(run.totals, measured))
        await self._admit("next", run, limit=free, measured=measured)
        self._core.work.fire()

    async def _close_run(self, run: EvalRun, groups: Sequence[GroupRecord]) -> None:
        """Store the result together with its row in the history."""
        measured = [g for g in groups if g.states == "m"]
        totals = _added(run.totals, measured)
        result = _result(run, totals, self._core.clock.now())
        last = EvalOutcome(
            version=run.version,
            step=run.step,
            reward=result["reward"],
            measured=totals.measured,
            of=run.total,
            complete=result["complete"],
        )
        fields: dict[str, Any] = {"eval_version": run.version, "eval_last": last}
        if last.complete:
            fields.update(eval_reward=last.reward, eval_step=run.step)
            if self._core.state.meta.eval_start is None:
                fields["eval_start"] = last.reward
        else:
            log.warning(
                "an eval measured too little to count", job=self._core.job_id, **asdict(last)
            )
        await self._list(run, measured)
        gone = json.dumps([g.group_id for g in groups] or [""])
        values = {name: value for name, value in result.items() if name != "step"}
        row = row_text(step=run.step, kind="eval", values=values)
        self._core.rows_written += 1
        await self._core.change("evals", "close", json.dumps(field_texts(**fields)), gone, row)

    async def _list(self, run: EvalRun, measured: Sequence[GroupRecord]) -> None:
        """Add measured trajectories to the ring that can be listed; the oldest are deleted."""
        store, ring = self._core.store, self._core.keys.eval_ring
        keep = self._core.spec.experience.keep_trajectories
        payloads = [name for group in measured for name in group.payloads()]
        first = run.version * _RUN_STRIDE + run.totals.measured
        flat = [x for score, name in enumerate(payloads, first) for x in (score, name)]
        if flat:
            await store.command("ZADD", ring, *flat)
        gone: list[bytes] = await store.command("ZRANGE", ring, 0, -keep - 1)
        if gone:
            await store.command("ZREM", ring, *gone)
        await self._groups.free([name.decode() for name in gone])

    def _open_groups(self) -> list[GroupRecord]:
        state = self._core.state
        return sorted((state.groups[name] for name in state.evals), key=lambda each: each.position)


def _is_started(group: GroupRecord) -> bool:
    return "q" not in group.states


def _added(totals: EvalTotals, groups: Iterable[GroupRecord]) -> EvalTotals:
    """Totals with these measured groups added."""
    found = [group.summaries()[0] for group in groups]
    return EvalTotals(
        measured=totals.measured + len(found),
        reward=totals.reward + sum(f.reward for f in found),
        tokens=totals.tokens + sum(f.policy_tokens for f in found),
        truncated=totals.truncated + sum(f.truncated for f in found),
    )


def _result(run: EvalRun, totals: EvalTotals, now: float) -> dict[str, Any]:
    """The values of the run's history row, and its step."""
    count = totals.measured
    return {
        "step": run.step,
        "version": run.version,
        "reward": totals.reward / count if count else None,
        "measured": count,
        "of": run.total,
        "complete": count >= MIN_MEASURED * run.total,
        "dropped": run.total - count,
        "tokens": totals.tokens,
        "response_tokens_mean": totals.tokens / count if count else None,
        "truncated_share": totals.truncated / count if count else None,
        # A restart loses some seconds of the job's clock, perhaps all of a short run.
        "seconds": max(0.0, now - run.since),
    }
