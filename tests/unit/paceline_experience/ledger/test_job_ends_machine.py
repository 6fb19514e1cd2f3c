"""Random histories of a job up to its end: it comes, and the books and files agree on it."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.enums import JobState
from paceline.errors import PacelineError
from paceline.v1.experience_pb2 import TrainSample
from paceline_experience.ledger.staleness import stale_groups
from paceline_experience.store.store import Store, client_of
from paceline_harness.wires import Wire

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site, Sites

STEPS = 12
EVAL: dict[str, Any] = {"every": 3, "tasks": 2, "timeout_s": 20, "options": {"split": "heldout"}}
ROUNDS = 60


class EndingMachine(RuleBasedStateMachine):
    """A trainer that trains, goes back and dies; a service and its store that fail under it.

    Everybody asks again after an error. An end may be ordered at any point of it.
    """

    def __init__(self, socket: str, sites: Sites) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory(prefix="pl")
        self.wire = Wire(upstream=Path(socket), path=Path(self.folder.name) / "w")
        self.run(self.wire.__aenter__())
        self.store = Store(client_of(f"unix://{Path(self.folder.name) / 'w'}"))
        self.run(self.store.command("FLUSHALL"))
        self.site: Site = sites(self.store, Path(self.folder.name) / "run")
        self.durable = 0
        self.tried: set[tuple[int, int]] = set()
        self.given: dict[int, set[tuple[str, int]]] = {}  # episodes of the batch of a step
        self.ordered = ""  # the end
        self.trainer_is_back = True

    def run(self, job: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(job)

    def attempt(self, job: Coroutine[Any, Any, Any]) -> Any:
        """What may be refused or cut; None then."""
        try:
            return self.run(job)
        except PacelineError:
            return None

    @initialize(
        measured=st.booleans(),
        steps=st.integers(0, 4),
        trainer_is_back=st.booleans(),
        filters=st.lists(st.integers(0, 99), max_size=2),
    )
    def submit(self, measured: bool, steps: int, trainer_is_back: bool, filters: list[int]) -> None:
        """Each filter keeps any part of a group, as its seed says."""
        stop = {"steps": STEPS, "wall_s": 1000}
        named = [{"kind": "at_least_one", "seed": seed} for seed in filters]
        experience = {"filters": named, "group_size": 3}
        self.run(
            self.site.submit(eval=EVAL if measured else None, stop=stop, experience=experience)
        )
        self.run(self.site.begin(0))
        for _ in range(steps):
            self.train()
        self.trainer_is_back = trainer_is_back

    @rule()
    def train(self) -> None:
        self.attempt(self._train())

    async def _train(self) -> None:
        step = await self.site.step()
        if not (await self.site.ledger()).stopping:
            await self.site.play(evals=0)
        if not await self._has_batch(step):
            return
        share = await self.site.take(step)
        if not share.stop:
            self.tried.add((self.site.incarnation, step + 1))
            samples = [TrainSample.FromString(data) for data in share.samples]
            self.given[step] = {(each.group_id, each.index) for each in samples}
            await self.site.commit(step, share.batch_id)
            await self.site.announce(step + 1)

    async def _state(self) -> Any:
        return (await self.site.ledger())._core.state  # pyright: ignore[reportPrivateUsage]

    async def _has_batch(self, step: int) -> bool:
        """Whether a batch is there, or can be made of groups that are not stale by now.

        If not, a trainer waits for more of them, which here nobody makes meanwhile.
        """
        ledger = await self.site.ledger()
        state, spec = await self._state(), ledger._core.spec.experience  # pyright: ignore[reportPrivateUsage]
        stale = stale_groups(state, state.ready, step=step, max_staleness=spec.max_staleness)
        return step in state.batches or len(state.ready) - len(stale) >= spec.batch_groups

    @rule()
    def take(self) -> None:
        """A batch that is taken, and whose trainer dies."""

        async def taken() -> None:
            step = await self.site.step()
            if await self._has_batch(step):
                await self.site.take(step)

        self.attempt(taken())

    @rule()
    def measure(self) -> None:
        self.attempt(self.site.play())
        self.run(self.site.sweep())

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        now = self.attempt(self.site.step())
        if now is not None and now >= self.durable:
            self.durable = data.draw(st.integers(self.durable, now))
            self.attempt(self.site.checkpoint(self.durable))

    @rule(data=st.data())
    def crash_of_trainer(self, data: st.DataObject) -> None:
        now = self.attempt(self.site.step())
        if now is not None and now >= self.durable:
            self.attempt(self.site.begin(data.draw(st.integers(self.durable, now))))

    @rule()
    def crash_of_service(self) -> None:
        self.wire.mend()
        self.run(self.site.die())

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.site.clock.advance(seconds)
        self.run(self.site.sweep())

    @rule(skip=st.integers(0, 8), done=st.booleans())
    def cut(self, skip: int, done: bool) -> None:
        self.wire.cut(skip=skip, done=done)

    @rule()
    def fill_disk(self) -> None:
        if not self.site.folder.exists():
            self.site.folder.write_text("not a folder")

    @rule()
    def empty_disk(self) -> None:
        if self.site.folder.is_file():
            self.site.folder.unlink()

    @precondition(lambda self: not self.ordered)
    @rule(end=st.sampled_from(["cancelled", "failed", "wall_s", "finished"]))
    def order(self, end: str) -> None:
        self.ordered = end
        self._order()

    def _order(self) -> None:
        """Whoever orders it asks again until it is heard."""
        if self.ordered == "cancelled":
            self.attempt(self.site.job_service.cancel(self.site.job_id, reason=""))
        elif self.ordered == "failed":
            self.attempt(
                self.site.job_service.set_state(self.site.job_id, JobState.FAILED, reason="")
            )
        elif self.ordered == "wall_s":
            self.site.clock.advance(1001)
            self.run(self.site.sweep())

    @rule()
    def control(self) -> None:
        """The controller has stopped what ran of a job that is to be cancelled or paused.

        It starts one that waits for capacity.
        """
        follows = {
            JobState.CANCELLING: JobState.CANCELLED,
            JobState.PAUSING: JobState.PAUSED,
            JobState.QUEUED: JobState.STARTING,
        }
        status = self.attempt(self.site.status())
        if status is not None and status.state in follows:
            to = follows[status.state]
            self.attempt(self.site.job_service.set_state(status.job_id, to, reason=""))

    @rule()
    def pause(self) -> None:
        self.attempt(self.site.pausing.pause(self.site.job_id, reason=""))

    @rule()
    def resume(self) -> None:
        self.attempt(self.site.pausing.resume(self.site.job_id, reason=""))

    @invariant()
    def nothing_is_leased_of_a_paused_job(self) -> None:
        """Once the service has looked at it; nor does its time pass."""
        status = self.attempt(self.site.status()) if self.site.job_id else None
        if status is None or status.state is not JobState.PAUSED:
            return
        self.wire.mend()
        self.run(self.site.sweep())
        ledger = self.run(self.site.ledger())
        demand = ledger.leases.demand()
        assert (demand.leased, demand.eval_leased) == (0, 0)
        assert (demand.new, demand.queued, demand.eval_queued) == (0, 0, 0)
        assert self.run(ledger.leases.lease(worker_id="w", train=9, evals=9)) == []
        assert ledger.pauses.held or ledger.pauses.stop != "paused"

    @invariant()
    def books_balance(self) -> None:
        if not self.site.job_id:
            return
        report = self.attempt(self._audit())
        assert report is None or report.ok, report.problems

    async def _audit(self) -> Any:
        return await (await self.site.ledger()).verify()

    def teardown(self) -> None:
        try:
            if self.site.job_id:
                self.wire.mend()
                self.end()
                self.check()
        finally:
            self.run(self.site.ledgers.close())
            self.run(self.store.close())
            self.run(self.wire.__aexit__(None, None, None))
            self.runner.close()
            self.folder.cleanup()

    def end(self) -> None:
        if not self.ordered:
            self.ordered = "finished"
        # The time of a job that was paused goes on with the first version of its next trainer.
        needs_trainer = self.ordered == "finished" or (
            self.ordered == "wall_s" and self.run(self._state()).meta.paused
        )
        if needs_trainer and not self.trainer_is_back:
            self.ordered = "failed"  # the controller gives it up
        for _ in range(ROUNDS):
            if self.run(self.site.status()).state.terminal:
                return
            self._order()
            self.resume()
            if self.trainer_is_back:
                if self.attempt(self._has_version()) is None:
                    self.attempt(self.site.begin(self.durable))
                self.train()
                self.attempt(self._asks_for_more())
            self.measure()
            self.control()
            self.site.clock.advance(30)
        raise AssertionError(f"the job is {self.run(self.site.status())}")

    async def _has_version(self) -> int | None:
        """The present trainer's has been announced."""
        state = await self._state()
        last = state.versions.get(state.version)
        present = last is not None and last.incarnation == self.site.incarnation
        return 1 if present and not state.meta.paused else None

    async def _asks_for_more(self) -> None:
        if (await self.site.ledger()).stopping:
            await self.site.take(await self.site.step())

    def check(self) -> None:
        status = self.run(self.site.status())
        allowed = {
            "cancelled": {"cancelled"},
            "failed": {"failed"},
            "wall_s": {"succeeded"} if status.summary["steps"] else {"failed"},
            "finished": {"succeeded"},
        }
        assert status.state in allowed[self.ordered] | {"succeeded"}, self.ordered
        report = self.run(self._audit())
        assert report.ok, report.problems
        assert status.summary["ledger_consistent"]
        assert status.summary["trajectories_missing"] == 0
        trained = report.counts["trained"] + report.counts["durable"]
        assert status.summary["episodes_trained"] == trained
        assert sum(status.summary["staleness_histogram"].values()) == trained
        listed, exported = self.run(self.site.listed()), self.site.exported()
        assert len(listed) == len(set(listed)) == trained
        given = [self.given[step] for step in range(status.summary["steps"])]
        assert set(listed) == set[tuple[str, int]]().union(*given)
        if "not_written" in status.summary:
            assert self.site.folder.is_file()
        else:
            assert sorted(exported) == sorted(listed)
        rows = self.run(self.site.rows())
        steps = Counter(row.step for row in rows if row.kind == "train")
        assert steps.keys() >= set(range(1, status.summary["steps"] + 1))
        tries = Counter(step for _, step in self.tried)
        assert all(count <= tries[step] for step, count in steps.items())
        versions = [row.values["version"] for row in rows if row.kind == "eval"]
        assert len(versions) == len(set(versions))


@pytest.mark.timeout(1800)
def test_every_job_ends(redis_socket: str, sites: Sites) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

    class Machine(EndingMachine):
        def __init__(self) -> None:
            super().__init__(redis_socket, sites)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=checks
        ),
    )
