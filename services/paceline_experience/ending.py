"""When the job is over, and what happens until it says so."""

from __future__ import annotations

import json

from paceline.logs import Log
from paceline.types import DropReason
from paceline_experience.admission import over_budget
from paceline_experience.batches import Batches
from paceline_experience.book import Book
from paceline_experience.core import Core, Hooks
from paceline_experience.evals import Evals
from paceline_experience.groups import Groups
from paceline_experience.leases import Leases

_PATIENCE_S = 120.0
log = Log("ending")
_REASONS = {
    "steps": "all steps are done",
    "eval_reward": "the eval reward is reached",
    "wall_s": "the time is over",
    "tasks": "all epochs of the tasks are over",
}


class Ending:
    """Stop conditions, the last eval, and the end of the job, told once."""

    def __init__(
        self,
        *,
        core: Core,
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

    async def stop(self, reason: str) -> None:
        """`cancelled` drops everything untrained, `paused` only stops admission, empty resumes."""
        async with self._core.transaction() as book:
            await self._core.note(stop=reason, stop_reason=reason)
            if reason == "cancelled":
                await self._drop_untrained(book, DropReason.CANCELLED, taken=True)
        if reason == "cancelled":
            await self._batches.release()
        self._core.ready.fire()
        self._core.work.fire()

    async def told(self, stop: str) -> None:
        """The trainer has been answered `finished`: what it has announced then is its last."""
        if stop == "finished" and not self._core.book.meta.get("told"):
            async with self._core.transaction():
                await self._core.note(told=1)

    async def check(self) -> None:
        """Begin to end when a stop condition holds; fail when nothing can come of it."""
        if self._core.book.stop:
            return
        if self._over_budget() and await self._batches.release():
            log.warning(
                "experience.payload_bytes is full: only the newest checkpoint can be gone back to",
                job=self._core.job_id,
                step=self._core.book.number("durable"),
            )
        problem = self._hopeless()
        if problem:
            await self._fail(problem)
            return
        reason = self._due()
        if not reason:
            return
        async with self._core.transaction() as book:
            if book.stop:  # somebody else was faster
                return
            now = self._core.clock.now()
            await self._core.note(stop="finished", stop_reason=reason, stop_at=repr(now), told="")
            await self._drop_untrained(book, DropReason.SURPLUS, taken=False)
        self._core.ready.fire()

    async def advance(self) -> None:
        """Finish once the last version is there and measured."""
        book = self._core.book
        if book.meta.get("done"):
            return
        if book.meta.get("stop_reason") == "failed":  # what was begun before a restart or an error
            await self._finish("failed", book.meta.get("problem", ""))
            return
        if book.stop != "finished":
            return
        last = book.versions.get(book.version)
        is_last = bool(book.meta.get("told")) and last is not None and last["step"] == book.step
        if not is_last and not self._out_of_patience(book):
            return
        if self._evals.run:
            return
        measured = book.number("eval_version", -1)
        if last is not None and self._evals.enabled and measured != last["version"]:
            await self._evals.start()
            return
        await self._finish("succeeded", _REASONS.get(book.meta.get("stop_reason", ""), ""))

    async def _finish(self, state: str, reason: str) -> None:
        async with self._core.transaction() as book:
            await self._core.note(closed=1)
            await self._drop_untrained(book, DropReason.SURPLUS, taken=True)
        await self._batches.release()
        await self._hooks.finished(state=state, reason=reason)
        async with self._core.transaction():
            await self._core.note(done=1)

    async def fail(self, reason: str) -> None:
        """Drop everything untrained; `advance` says that the job has failed until that is heard."""
        async with self._core.transaction() as book:
            await self._begin_to_fail(reason)
            await self._drop_untrained(book, DropReason.CANCELLED, taken=True)
        self._core.ready.fire()
        self._core.work.fire()

    async def _fail(self, reason: str) -> None:
        async with self._core.transaction() as book:
            if book.stop:
                return
            await self._begin_to_fail(reason)
        self._core.ready.fire()
        await self._finish("failed", reason)

    async def _begin_to_fail(self, reason: str) -> None:
        await self._core.note(stop="cancelled", stop_reason="failed", problem=reason, done="")

    def _out_of_patience(self, book: Book) -> bool:
        spec = self._core.spec.eval
        patience_s = spec.timeout_s if spec is not None else _PATIENCE_S
        since = float(book.meta.get("stop_at") or 0)
        return self._core.clock.now() - since > max(patience_s, _PATIENCE_S)

    def _due(self) -> str:
        book, stop = self._core.book, self._core.spec.stop
        if book.step >= stop.steps:
            return "steps"
        reached = book.meta.get("eval_reward")
        if stop.eval_reward is not None and reached and float(reached) >= stop.eval_reward:
            return "eval_reward"
        started = float(book.meta.get("started") or self._core.clock.now())
        if stop.wall_s is not None and self._core.clock.now() - started >= stop.wall_s:
            return "wall_s"
        return "tasks" if self._tasks_over(book) else ""

    def _tasks_over(self, book: Book) -> bool:
        few = len(book.ready) < self._core.spec.experience.batch_groups
        return self._core.feed.over and not book.open and few and book.step not in book.batches

    def _hopeless(self) -> str:
        """Why the job cannot go on; empty if it can."""
        if problem := self._core.feed.problem or self._batches.problem:
            return problem
        book, spec = self._core.book, self._core.spec.experience
        invalid, ended = book.counts["groups:invalid"], book.counts["groups:ended"]
        all_bad = 0 < invalid == ended and not book.open
        if invalid == ended >= 2 * spec.batch_groups or (all_bad and self._core.feed.over):
            return book.meta.get("invalid_detail") or "no task could be run"
        stuck = self._batches.waiting and not book.open
        if stuck and self._over_budget():
            return (
                f"experience.payload_bytes: {spec.payload_bytes} is full and no batch is ready; "
                "raise it or write checkpoints more often"
            )
        return ""

    def _over_budget(self) -> bool:
        return over_budget(self._leases.limits, self._leases.load())

    async def _drop_untrained(self, book: Book, reason: DropReason, *, taken: bool) -> None:
        states = "qlfrt" if taken else "qlfr"
        names = [
            name
            for name, group in book.groups.items()
            if not group.states.strip(states) and (taken or not group.is_eval)
        ]
        await self._groups.drop(names, reason)
        for step, batch in [*book.batches.items()]:
            if not all(name in book.groups for name in batch["groups"]):
                del book.batches[step]
        if taken and book.meta.get("eval"):
            rest = json.dumps([*book.evals] or [""])
            await self._core.change("evals", "close", json.dumps({"eval_due": ""}), rest, "")
