"""Held-out evals: runs of pinned episodes, outside admission and the identity."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any

from paceline.config.job import MAX_EVAL_EPISODES, MAX_KEPT_EPISODES
from paceline.platform.progress import EvalOutcome, EvalProgress, EvalStanding
from paceline.platform.telemetry.logs import Log
from paceline.plugins import TaskSource
from paceline.types import EpisodeProgress
from paceline_experience.ledger.checkpoints import evaluated
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.evaluation.scores import added, means, standard_errors
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
_RUN_STRIDE = MAX_EVAL_EPISODES  # places of a version in the ring of measured trajectories


class Evals:
    """At most one run is open; what becomes due meanwhile runs next, on the newest version.

    Evaluations that are due at the same version measure it one after the other. A run has at most
    `limits.eval_window` episodes open: measured tasks are added to its totals and make way for the
    next.
    """

    def __init__(
        self, *, core: LedgerContext, groups: Groups, eval_tasks: Mapping[str, TaskSource]
    ) -> None:
        self._core = core
        self._groups = groups
        self._window = core.limits.settings.eval_window
        self._sampled = set[tuple[str, int, int]]()  # group, index and attempt, in the open run
        self._sets = {
            name: each
            for name, each in core.spec.eval_sets.items()
            if len(eval_tasks.get(name, ()))
        }
        self._sizes = {
            name: min(each.tasks, len(eval_tasks[name])) for name, each in self._sets.items()
        }

    @property
    def run(self) -> EvalRun | None:
        """The open run."""
        return self._core.state.meta.eval

    def measured(self, version: int) -> bool:
        """Whether all evaluations have measured a version."""
        return all(self._measured(name) == version for name in self._sets)

    def nothing_measured(self) -> str:
        """Names of the evaluations of which no task has a score; empty: there is none."""
        found, names = self._core.state.meta.eval_sets, self._core.spec.eval_sets
        failed = [n for n in names if n not in found or not found[n].last.measured]
        return ", ".join(name or "eval" for name in failed)

    @property
    def reward(self) -> float | None:
        """Mean reward of the last complete run of the main evaluation; None: there is none."""
        main = self._main()
        return None if main is None else main.reward

    def standings(self) -> dict[str, Any]:
        """What evaluations have come to, as fields of `LedgerProgress`."""
        found, main = self._core.state.meta.eval_sets, self._main()
        named = tuple(each for name, each in found.items() if name)
        if main is None:
            return {"evals": named}
        return {
            "eval_last": main.last,
            "eval_reward": main.reward,
            "eval_step": main.step,
            "eval_reward_start": main.reward_start,
            "evals": named,
        }

    def progress(self) -> EvalProgress | None:
        """Progress of the open run, for `live`; None: none is open."""
        run = self.run
        if run is None:
            return None
        groups = self._open_groups()
        measured = run.totals.measured + sum(map(_is_measured, groups))
        dropped = run.admitted - run.totals.measured - len(groups)
        return EvalProgress(
            version=run.version,
            step=run.step,
            total=run.total,
            measured=measured,
            open=run.total - measured - dropped,
            name=run.name,
        )

    def held_version(self) -> int:
        """The version at which eval workers are held; -1: none.

        A run whose last episodes wait for their scores needs no tokens, although it is still open.
        """
        run = self.run
        if run is None or (run.admitted == run.total and not run.then and self._all_sampled()):
            return -1
        return run.version

    def observe(self, progress: Iterable[EpisodeProgress]) -> None:
        """Episodes that need no further tokens; forgotten by a restart, which is told again."""
        state = self._core.state
        for each in progress:
            group = state.find(each.group_id, each.index, each.attempt) if each.sampled else None
            if group is not None and group.is_eval:
                self._sampled.add((each.group_id, each.index, each.attempt))

    def _all_sampled(self) -> bool:
        counts, state = self._core.state.counts, self._core.state
        if counts["eval:queued"] or counts["eval:leased"] > len(self._sampled):
            return False
        # Without those that have ended, the comparison alone says no until others need no tokens.
        self._sampled = {key for key in self._sampled if state.find(*key) is not None}
        return len(self._sampled) == counts["eval:leased"]

    @property
    def idle(self) -> bool:
        """Whether a run is open without an open episode."""
        counts = self._core.state.counts
        return self.run is not None and not counts["eval:queued"] + counts["eval:leased"]

    async def on_publication(self, step: int) -> None:
        """A version of `step` was published: start the evaluations that are due."""
        spec = self._core.spec
        ends = step >= spec.stop.steps or not spec.trains
        due = [name for name, each in self._sets.items() if ends or step % each.every == 0]
        if due:
            await self.start(due)

    async def start(self, names: Collection[str] | None = None) -> None:
        """Measure the newest version with these evaluations (None: with all), in their order.

        If a run is open, on another version, they are noted to be due.
        """
        async with self._core.transaction() as state:
            last, run = state.versions.get(state.version), self.run
            if last is None:
                return
            due = {*state.meta.eval_due, *(self._sets if names is None else names)}
            wanted = tuple(
                name for name in self._sets if name in due and self._measured(name) != last.version
            )
            if not wanted:
                return
            if last.version in state.meta.withdrawn:  # the next one is measured
                if wanted != state.meta.eval_due:
                    await self._core.note(eval_due=wanted)
                return
            if run is not None:
                if run.version != last.version:
                    await self._core.note(eval_due=wanted)
                elif more := tuple(n for n in wanted if n != run.name and n not in run.then):
                    await self._core.note(eval=replace(run, then=(*run.then, *more)))
                return
            await self._core.change("evals", "open", *self._first_window(last, wanted))
        self._core.work.fire()

    def _first_window(self, of: Publication, names: tuple[str, ...]) -> list[str]:
        """Arguments of a script that opens a run of the first of these evaluations."""
        name, *then = names
        now = self._core.clock.now()
        run = EvalRun(
            version=of.version,
            step=of.step,
            total=self._sizes[name],
            since=now,
            deadline=now + self._sets[name].timeout_s,
            name=name,
            then=tuple(then),
        )
        return self._window_arguments(run, limit=self._window_tasks(name))

    def _window_arguments(self, run: EvalRun, *, limit: int) -> list[str]:
        """Arguments of a script that admits up to `limit` more tasks of a run."""
        admitted = min(run.total, run.admitted + limit)
        positions = json.dumps([*range(run.admitted, admitted)])
        name = f"{run.version}-{run.name}" if run.name else str(run.version)
        record = record_text(replace(run, admitted=admitted))
        samples = str(self._sets[run.name].samples)
        return [record, positions, f"{self._core.job_id}.e{name}.", samples]

    def _window_tasks(self, name: str) -> int:
        return max(1, self._window // self._sets[name].samples)

    async def sweep(self) -> None:
        """Advance the run; close it when its tasks or its time are up; open one that is due."""
        async with self._core.transaction() as state:
            await self._advance()
            due = state.meta.eval_due if self.run is None else ()
        if due:
            await self.start(due)

    async def _advance(self) -> None:
        run, now = self.run, self._core.clock.now()
        if run is None:
            return
        groups = self._open_groups()
        if not run.leased and (len(groups) < run.admitted or any(map(_is_started, groups))):
            # The timeout starts with the first lease: workers may still be starting.
            run = replace(run, leased=True, deadline=now + self._sets[run.name].timeout_s)
            await self._core.note(eval=run)
        unfinished = run.admitted < run.total or not all(map(_is_measured, groups))
        if now >= run.deadline or not unfinished:
            await self._close_run(run, groups)
        else:
            await self._refill(run, groups)

    async def _refill(self, run: EvalRun, groups: Sequence[GroupRecord]) -> None:
        """Refill the window, unless more than half of it is in use or all tasks are admitted."""
        measured, window = [*filter(_is_measured, groups)], self._window_tasks(run.name)
        free = window - len(groups) + len(measured)
        if run.admitted == run.total or 2 * free < window:
            return
        await self._list(run, measured)
        run = self._with_totals(run, measured)
        gone = json.dumps([group.group_id for group in measured])
        await self._core.change("evals", "next", *self._window_arguments(run, limit=free), gone)
        self._core.work.fire()

    async def _close_run(self, run: EvalRun, groups: Sequence[GroupRecord]) -> None:
        """Store the result together with its row in the history; start what is next."""
        measured = [*filter(_is_measured, groups)]
        samples = self._sets[run.name].samples
        totals = self._with_totals(run, measured).totals
        of = self._core.state.versions.get(run.version)
        result = _result(run, totals, self._core.clock.now(), samples=samples)
        result |= self._policy(run, totals, of)
        if self._sets[run.name].majority_at and totals.measured:
            result["text_vote_share"] = totals.texts / (totals.measured * samples)
        standing = self._standing(run, totals, complete=result["complete"])
        if not standing.last.complete:
            log.warning(
                "an eval measured too little to count",
                job=self._core.job_id,
                eval=run.name,
                **asdict(standing.last),
            )
        await self._list(run, measured)
        unlisted = [name for g in groups if not _is_measured(g) for name in g.payloads()]
        gone = json.dumps([g.group_id for g in groups] or [""])
        values = {name: value for name, value in result.items() if name != "step"}
        row = row_text(step=run.step, kind="eval", values=values)
        sets = {**self._core.state.meta.eval_sets, run.name: standing}
        values = evaluated(self._core.state.meta, self._core.spec, run, of, result)
        texts = json.dumps(field_texts(eval_sets=sets, evaluated=values))
        then = self._first_window(of, run.then) if of is not None and run.then else []
        self._core.rows_written += 1
        await self._core.change("evals", "close", texts, gone, row, *then)
        self._sampled.clear()
        await self._groups.free(unlisted)
        if then:
            self._core.work.fire()

    def _policy(self, run: EvalRun, totals: EvalTotals, of: Publication | None) -> dict[str, Any]:
        """What was measured: weights, or what an endpoint says has answered."""
        if self._core.spec.model.endpoint is None:
            return {"version": run.version, "weights": of.digest if of is not None else ""}
        return {"endpoint": self._core.spec.model.endpoint.name, "models": totals.models}

    def _standing(self, run: EvalRun, totals: EvalTotals, *, complete: bool) -> EvalStanding:
        count = totals.measured
        last = EvalOutcome(
            version=run.version,
            step=run.step,
            reward=totals.reward / count if count else None,
            measured=count,
            of=run.total,
            complete=complete,
            scores=means(totals.scores, count),
        )
        before = self._core.state.meta.eval_sets.get(run.name) or EvalStanding(run.name, last)
        if not complete:
            return replace(before, last=last)
        start = before.reward_start
        return EvalStanding(
            name=run.name,
            last=last,
            reward=last.reward,
            step=run.step,
            reward_start=last.reward if start is None else start,
        )

    async def begin_anew(self) -> None:
        """Inside a transaction: drop the open run; the next version that comes is measured."""
        if (run := self.run) is not None:
            due = (run.name, *run.then, *self._core.state.meta.eval_due)
            await self.abandon(due=tuple(dict.fromkeys(due)))

    async def abandon(self, due: tuple[str, ...] = ()) -> None:
        """Inside a transaction: drop the open run without a result; these are due again."""
        state = self._core.state
        payloads = [name for each in self._open_groups() for name in each.payloads()]
        groups = json.dumps([*state.evals] or [""])
        await self._core.change("evals", "close", json.dumps(field_texts(eval_due=due)), groups, "")
        await self._groups.free(payloads)

    async def _list(self, run: EvalRun, measured: Sequence[GroupRecord]) -> None:
        """Add measured trajectories to the ring that can be listed; the oldest are deleted."""
        store, ring = self._core.store, self._core.keys.eval_ring
        spec = self._core.spec
        keep = spec.experience.keep_trajectories if spec.trains else MAX_KEPT_EPISODES
        payloads = [name for group in measured for name in group.payloads()]
        first = run.version * _RUN_STRIDE + self._first_place(run.name)
        first += run.totals.measured * self._sets[run.name].samples
        flat = [x for score, name in enumerate(payloads, first) for x in (score, name)]
        if flat:
            await store.command("ZADD", ring, *flat)
        gone: list[bytes] = await store.command("ZRANGE", ring, 0, -keep - 1)
        if gone:
            await store.command("ZREM", ring, *gone)
        await self._groups.free([name.decode() for name in gone])

    def _first_place(self, name: str) -> int:
        """Episodes of the evaluations before this one."""
        before = takewhile(lambda each: each != name, self._sets)
        return sum(self._sizes[each] * self._sets[each].samples for each in before)

    def _with_totals(self, run: EvalRun, measured: Sequence[GroupRecord]) -> EvalRun:
        tasks = [group.summaries() for group in measured]
        return replace(run, totals=added(run.totals, tasks, self._sets[run.name]))

    def _measured(self, name: str) -> int:
        """The version that an evaluation has measured last; -1: none."""
        found = self._core.state.meta.eval_sets.get(name)
        return -1 if found is None else found.last.version

    def _main(self) -> EvalStanding | None:
        return self._core.state.meta.eval_sets.get(self._core.spec.main_eval or "")

    def _open_groups(self) -> list[GroupRecord]:
        state = self._core.state
        return sorted((state.groups[name] for name in state.evals), key=lambda each: each.position)


def _is_started(group: GroupRecord) -> bool:
    return bool(group.states.strip("q"))


def _is_measured(group: GroupRecord) -> bool:
    return not group.states.strip("m")


def _result(run: EvalRun, totals: EvalTotals, now: float, *, samples: int) -> dict[str, Any]:
    """The values of the run's history row, and its step."""
    count = totals.measured
    episodes = count * samples
    return {
        "step": run.step,
        **({"set": run.name} if run.name else {}),
        "reward": totals.reward / count if count else None,
        **means(totals.scores, count),
        "stderr": standard_errors(totals),
        "measured": count,
        "of": run.total,
        "complete": count >= MIN_MEASURED * run.total,
        "dropped": run.total - count,
        "tokens": totals.tokens,
        "response_tokens_mean": totals.tokens / episodes if episodes else None,
        "truncated_share": totals.truncated / episodes if episodes else None,
        "parse_error_share": totals.parse_errors / episodes if episodes else None,
        "timeout_share": totals.timeouts / episodes if episodes else None,
        # A restart loses some seconds of the job's clock, perhaps all of a short run.
        "seconds": max(0.0, now - run.since),
    }
