"""Held-out measurement: runs of pinned episodes, outside admission and the identity."""

from __future__ import annotations

import json
from typing import Any

from paceline.interfaces import TaskSource
from paceline.logs import Log
from paceline_experience.book import Facts, Group
from paceline_experience.core import Core, Hooks
from paceline_experience.groups import Groups

MIN_MEASURED = 0.9
"""Share of an eval's tasks below which its result is told, and counts for nothing."""
log = Log("evals")


class Evals:
    """At most one run is open; what became due meanwhile runs next, on the newest version."""

    def __init__(
        self, *, core: Core, groups: Groups, eval_tasks: TaskSource | None, hooks: Hooks
    ) -> None:
        self._core = core
        self._groups = groups
        self._hooks = hooks
        self._spec = core.spec.eval
        self._size = 0
        if self._spec is not None and eval_tasks is not None:
            self._size = min(self._spec.tasks, len(eval_tasks))

    @property
    def run(self) -> dict[str, Any]:
        """The open run: version, step, total, since, deadline; empty if none."""
        text = self._core.book.meta.get("eval", "")
        return json.loads(text) if text else {}

    @property
    def last(self) -> dict[str, Any]:
        """The newest run that is over: version, step, reward, measured, of, complete.

        Empty if there was none; the reward is None if nothing was measured.
        """
        text = self._core.book.meta.get("eval_last", "")
        return json.loads(text) if text else {}

    @property
    def enabled(self) -> bool:
        """Whether this job measures at all."""
        return self._size > 0

    def progress(self) -> dict[str, Any]:
        """The open run for whoever watches."""
        run = self.run
        if not run:
            return {}
        groups = [self._core.book.groups[name] for name in self._core.book.evals]
        measured = sum(g.states == "m" for g in groups)
        return {
            "version": run["version"],
            "step": run["step"],
            "total": run["total"],
            "measured": measured,
            "open": len(groups) - measured,
        }

    def held(self) -> int:
        """The version at which eval workers stay; -1: none."""
        run = self.run
        return int(run["version"]) if run else -1

    async def announced(self, step: int) -> None:
        """A version of `step` is there: measure it if it is due."""
        if self._spec is None or not self.enabled:
            return
        if step % self._spec.every == 0 or step >= self._core.spec.stop.steps:
            await self.start()

    async def start(self) -> None:
        """Open a run on the newest version, or note that one is due."""
        async with self._core.transaction() as book:
            last = book.versions.get(book.version)
            if last is None or book.number("eval_version", -1) == last["version"]:
                return
            if self.run:
                if self.run["version"] != last["version"]:
                    await self._core.note(eval_due=1)
                return
            await self._open(last)
        self._core.work.fire()

    async def _open(self, last: dict[str, int]) -> None:
        assert self._spec is not None
        now, number = self._core.clock.now(), last["version"]
        run = {
            "version": number,
            "step": last["step"],
            "total": self._size,
            "since": now,
            "deadline": now + self._spec.timeout_s,
            "leased": 0,
        }
        job = self._core.job_id
        groups = [[f"{job}.e{number}.{i}", i, i] for i in range(self._size)]
        await self._core.change("evals", "open", json.dumps(run), json.dumps(groups))

    async def sweep(self) -> None:
        """Close the run when everything is measured or its time is over; open a due one."""
        async with self._core.transaction() as book:
            result = await self._advance()
            due = bool(book.meta.get("eval_due")) and not self.run
        if result is not None:
            step = int(result.pop("step"))
            await self._hooks.metric(step=step, kind="eval", values=result)
        if due:
            await self.start()

    async def _advance(self) -> dict[str, Any] | None:
        run, book, now = self.run, self._core.book, self._core.clock.now()
        if not run:
            return None
        groups = [book.groups[name] for name in book.evals]
        if not run["leased"] and any("q" not in g.states for g in groups):
            # The time runs from the first lease: workers may still be starting.
            assert self._spec is not None
            run.update(leased=1, deadline=now + self._spec.timeout_s)
            await self._core.note(eval=json.dumps(run))
        if now < run["deadline"] and any(g.states != "m" for g in groups):
            return None
        return await self._close(run, groups)

    async def _close(self, run: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
        measured = [g for g in groups if g.states == "m"]
        facts = [g.decoded()[0] for g in measured]
        result = _result(run, facts, self._core.clock.now())
        names = ("version", "step", "reward", "measured", "of", "complete")
        last = {name: result[name] for name in names}
        fields: dict[str, Any] = {"eval_version": run["version"], "eval_last": json.dumps(last)}
        if result["complete"]:
            fields.update(eval_reward=result["reward"], eval_step=run["step"])
            if not self._core.book.meta.get("eval_start"):
                fields["eval_start"] = result["reward"]
        else:
            log.warning("an eval measured too little to count", job=self._core.job_id, **last)
        payloads = [name for g in measured for name in g.payloads()]
        await self._keep(int(run["version"]), payloads)
        names = json.dumps([g.group_id for g in groups] or [""])
        await self._core.change("evals", "close", json.dumps(fields), names)
        return result

    async def _keep(self, version: int, payloads: list[str]) -> None:
        """Put measured trajectories into the ring of the console; the oldest leave it."""
        store, ring = self._core.store, self._core.keys.eval_ring
        keep = self._core.spec.experience.keep_trajectories
        flat = [x for place, n in enumerate(payloads) for x in (version * 1048576 + place, n)]
        if flat:
            await store.command("ZADD", ring, *flat)
        gone: list[bytes] = await store.command("ZRANGE", ring, 0, -keep - 1)
        if gone:
            await store.command("ZREM", ring, *gone)
        await self._groups.free([name.decode() for name in gone])


def _result(run: dict[str, Any], facts: list[Facts], now: float) -> dict[str, Any]:
    count = len(facts)
    tokens = sum(f.policy_tokens for f in facts)
    return {
        "step": run["step"],
        "version": run["version"],
        "reward": sum(f.reward for f in facts) / count if count else None,
        "measured": count,
        "of": run["total"],
        "complete": count >= MIN_MEASURED * run["total"],
        "dropped": run["total"] - count,
        "tokens": tokens,
        "response_tokens_mean": tokens / count if count else None,
        "truncated_share": sum(f.truncated for f in facts) / count if count else None,
        "seconds": now - run["since"],
    }
