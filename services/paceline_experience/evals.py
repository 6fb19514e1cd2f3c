"""Held-out measurement: runs of pinned episodes, outside admission and the identity."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.interfaces import TaskSource
from paceline.logs import Log
from paceline_experience.book import Facts, Group
from paceline_experience.core import Core
from paceline_experience.groups import Groups
from paceline_experience.history import row_text

MIN_MEASURED = 0.9
"""Share of an eval's tasks below which its result is told, and counts for nothing."""
log = Log("evals")
_ONE_RUN = 1 << 20  # places of one run among all that were measured, in the order of the ring


class Evals:
    """At most one run is open; what became due meanwhile runs next, on the newest version.

    A run holds at most `limits.eval_window` episodes: what is measured is summed up and makes room
    for the next.
    """

    def __init__(self, *, core: Core, groups: Groups, eval_tasks: TaskSource | None) -> None:
        self._core = core
        self._groups = groups
        self._spec = core.spec.eval
        self._window = core.limits.settings.eval_window
        self._size = 0
        if self._spec is not None and eval_tasks is not None:
            self._size = min(self._spec.tasks, len(eval_tasks))

    @property
    def run(self) -> dict[str, Any]:
        """The open run: version, step, total, admitted, sums, since, deadline; empty if none."""
        text = self._core.book.meta.get("eval", "")
        run: dict[str, Any] = json.loads(text) if text else {}
        # One that 0.1.0 has opened has let all of its tasks in at once.
        return {"admitted": run["total"], "sums": _sums([]), **run} if run else {}

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
        groups = self._there()
        measured = run["sums"]["measured"] + sum(g.states == "m" for g in groups)
        dropped = run["admitted"] - run["sums"]["measured"] - len(groups)
        return {
            "version": run["version"],
            "step": run["step"],
            "total": run["total"],
            "measured": measured,
            "open": run["total"] - measured - dropped,
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
        now = self._core.clock.now()
        run = {
            "version": last["version"],
            "step": last["step"],
            "total": self._size,
            "admitted": 0,
            "sums": _sums([]),
            "since": now,
            "deadline": now + self._spec.timeout_s,
            "leased": 0,
        }
        await self._admit("open", run, room=self._window, measured=[])

    async def _admit(
        self, command: str, run: dict[str, Any], *, room: int, measured: Sequence[Group]
    ) -> None:
        """Let in the next tasks of a run, and what is measured go; `run` is kept as it is then."""
        start = run["admitted"]
        run["admitted"] = min(run["total"], start + room)
        prefix = f"{self._core.job_id}.e{run['version']}"
        groups = [[f"{prefix}.{i}", i, i] for i in range(start, run["admitted"])]
        gone = [group.group_id for group in measured]
        await self._core.change("evals", command, *map(json.dumps, (run, groups, gone)))

    async def sweep(self) -> None:
        """Go on with the run, or close it when its tasks or its time are over; open a due one."""
        async with self._core.transaction() as book:
            await self._advance()
            due = bool(book.meta.get("eval_due")) and not self.run
        if due:
            await self.start()

    async def _advance(self) -> None:
        run, now = self.run, self._core.clock.now()
        if not run:
            return
        groups = self._there()
        if not run["leased"] and (len(groups) < run["admitted"] or any(map(_is_begun, groups))):
            # The time runs from the first lease: workers may still be starting.
            assert self._spec is not None
            run.update(leased=1, deadline=now + self._spec.timeout_s)
            await self._core.note(eval=json.dumps(run))
        waits = run["admitted"] < run["total"] or any(g.states != "m" for g in groups)
        if now >= run["deadline"] or not waits:
            await self._close(run, groups)
        else:
            await self._continue(run, groups)

    async def _continue(self, run: dict[str, Any], groups: Sequence[Group]) -> None:
        """Fill the window again, unless it is nearly full or everything has come in."""
        measured = [g for g in groups if g.states == "m"]
        room = self._window - len(groups) + len(measured)
        if run["admitted"] == run["total"] or 2 * room < self._window:
            return
        await self._keep(run, measured)
        run["sums"] = _added(run["sums"], _facts(measured))
        await self._admit("next", run, room=room, measured=measured)
        self._core.work.fire()

    async def _close(self, run: dict[str, Any], groups: Sequence[Group]) -> None:
        """Keep the result and its row in the history together."""
        measured = [g for g in groups if g.states == "m"]
        sums = _added(run["sums"], _facts(measured))
        result = _result(run, sums, self._core.clock.now())
        names = ("version", "step", "reward", "measured", "of", "complete")
        last = {name: result[name] for name in names}
        fields: dict[str, Any] = {"eval_version": run["version"], "eval_last": json.dumps(last)}
        if result["complete"]:
            fields.update(eval_reward=result["reward"], eval_step=run["step"])
            if not self._core.book.meta.get("eval_start"):
                fields["eval_start"] = result["reward"]
        else:
            log.warning("an eval measured too little to count", job=self._core.job_id, **last)
        await self._keep(run, measured)
        gone = json.dumps([g.group_id for g in groups] or [""])
        values = {name: value for name, value in result.items() if name != "step"}
        row = row_text(step=int(run["step"]), kind="eval", values=values)
        self._core.rows_written += 1
        await self._core.change("evals", "close", json.dumps(fields), gone, row)

    async def _keep(self, run: dict[str, Any], measured: Sequence[Group]) -> None:
        """Put measured trajectories into the ring of the console; the oldest leave it."""
        store, ring = self._core.store, self._core.keys.eval_ring
        keep = self._core.spec.experience.keep_trajectories
        payloads = [name for group in measured for name in group.payloads()]
        first = run["version"] * _ONE_RUN + run["sums"]["measured"]
        flat = [x for place, name in enumerate(payloads, first) for x in (place, name)]
        if flat:
            await store.command("ZADD", ring, *flat)
        gone: list[bytes] = await store.command("ZRANGE", ring, 0, -keep - 1)
        if gone:
            await store.command("ZREM", ring, *gone)
        await self._groups.free([name.decode() for name in gone])

    def _there(self) -> list[Group]:
        book = self._core.book
        return sorted((book.groups[name] for name in book.evals), key=lambda each: each.position)


def _is_begun(group: Group) -> bool:
    return "q" not in group.states


def _facts(groups: Iterable[Group]) -> list[Facts]:
    return [group.decoded()[0] for group in groups]


def _sums(facts: Sequence[Facts]) -> dict[str, Any]:
    return {
        "measured": len(facts),
        "reward": sum(f.reward for f in facts),
        "tokens": sum(f.policy_tokens for f in facts),
        "truncated": sum(f.truncated for f in facts),
    }


def _added(sums: dict[str, Any], facts: Sequence[Facts]) -> dict[str, Any]:
    return {name: sums[name] + more for name, more in _sums(facts).items()}


def _result(run: dict[str, Any], sums: dict[str, Any], now: float) -> dict[str, Any]:
    count: int = sums["measured"]
    return {
        "step": run["step"],
        "version": run["version"],
        "reward": sums["reward"] / count if count else None,
        "measured": count,
        "of": run["total"],
        "complete": count >= MIN_MEASURED * run["total"],
        "dropped": run["total"] - count,
        "tokens": sums["tokens"],
        "response_tokens_mean": sums["tokens"] / count if count else None,
        "truncated_share": sums["truncated"] / count if count else None,
        # A restart forgets some seconds of the job's time, perhaps all of a short run.
        "seconds": max(0.0, now - run["since"]),
    }
