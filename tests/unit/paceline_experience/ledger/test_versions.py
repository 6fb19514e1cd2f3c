"""Verdicts of rollout workers on versions: who is believed, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

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

from paceline.types import WeightRefusal
from paceline.v1 import experience_pb2 as pb
from paceline_experience.ledger.lifecycle.versions import MAX_WITHDRAWN
from paceline_experience.store.store import Store, client_of

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import BatchShare, JobLedger
    from paceline_harness.ledgers.world import World, Worlds

T = TypeVar("T")
REASON = "canary: trim 0.31, noise 0.04, ratio 7.8, allowed 2.0"
SYNCHRONOUS: dict[str, Any] = {"max_staleness": 0}
WORKERS = ("a", "b", "c")


def refusal(version: int) -> WeightRefusal:
    return WeightRefusal(version, REASON)


async def refuse(ledger: JobLedger, version: int, *, workers: int = 2) -> None:
    await ledger.versions.hear(serving=[-1] * workers, refusals=[refusal(version)] * workers)


async def publish(ledger: JobLedger, step: int, *, parent: int) -> int:
    made = await ledger.publish_version(incarnation=1, step=step, parent=parent, num_bytes=10)
    return made.version


def versions_of(share: Any) -> set[int]:
    samples = [pb.TrainSample.FromString(data) for data in share.samples]
    return {run.version for sample in samples for run in sample.versions}


async def test_a_version_waits_for_the_verdict_of_every_worker(
    store: Store, worlds: Worlds
) -> None:
    ledger = await worlds(store).started()
    await ledger.versions.hear(serving=[-1, -1], refusals=[refusal(0), None])
    await ledger.versions.hear(serving=[], refusals=[])
    assert ledger.versions.withdrawn == ()
    await refuse(ledger, 0)
    assert ledger.versions.withdrawn == (0,)


async def test_a_synchronous_job_goes_on_with_the_same_weights_under_another_number(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience=SYNCHRONOUS)
    ledger = await world.started()
    await world.filled(ledger)
    await world.trained(ledger, 0)
    waits = await world.waiting(ledger, 1)
    others = asyncio.create_task(ledger.take(incarnation=1, step=1, rank=1, world=2))
    await ledger.versions.hear(serving=[0, 0], refusals=[None, None])
    await refuse(ledger, 1)
    assert (await waits).publish_again
    assert (await others).publish_again
    assert await publish(ledger, 1, parent=1) == 2
    waits = await world.waiting(ledger, 1)  # and does not publish over and over
    (assignment, *_) = await world.filled(ledger, version=2)
    assert assignment.min_version <= 2
    share = await waits
    assert (share.step, share.stop, share.publish_again) == (1, None, False)
    assert versions_of(share) == {2}
    await ledger.versions.hear(serving=[2, 2], refusals=[None, None])
    assert (ledger.versions.accepted, ledger.versions.withdrawn) == (2, ())
    await world.clean(ledger)


async def test_a_batch_that_is_there_comes_before_another_publication(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    await world.filled(ledger)
    await refuse(ledger, 0)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    assert not share.publish_again


async def test_a_trainer_that_publishes_anyway_is_not_asked_to(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, trainer={"publish_every": 2, "checkpoint": {"every": 2}})
    ledger = await world.started()
    await refuse(ledger, 0)
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=0)
    starting = asyncio.create_task(ledger.take(incarnation=incarnation, step=0, rank=0, world=1))
    while not (await ledger.live()).waiting:
        await asyncio.sleep(0.001)
    told: dict[str, Any] = {"incarnation": incarnation, "step": 0, "num_bytes": 10}
    assert (await ledger.publish_version(parent=0, **told)).version == 1
    await refuse(ledger, 1)
    assert (await starting).publish_again
    assert (await ledger.publish_version(parent=1, **told)).version == 2


async def test_an_evaluation_of_a_withdrawn_version_is_that_of_the_next(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, eval={"every": 1, "tasks": 2, "timeout_s": 50})
    ledger = await world.started()
    assert await ledger.leases.lease(worker_id="w", train=0, evals=1)
    assert ledger.evals.held_version() == 0
    await refuse(ledger, 0)
    for _ in range(3):
        await ledger.sweep()
    assert ledger.evals.held_version() == -1
    assert not await ledger.leases.lease(worker_id="w", train=0, evals=9)
    assert await publish(ledger, 0, parent=0) == 1
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=9)
    assert [each.pinned_version for each in leased] == [1, 1]
    await ledger.submit([world.made(each, 0, version=1) for each in leased])
    await ledger.sweep()
    assert [row["version"] for _, row in world.hooks.of("eval")] == [1]
    await world.clean(ledger)


async def test_three_withdrawn_versions_in_a_row_end_the_job(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    for version in range(MAX_WITHDRAWN):
        ledger = await world.opened()  # which is no excuse
        await refuse(ledger, version)
        await refuse(ledger, version)
        await publish(ledger, 0, parent=version)
    await ledger.sweep()
    ((state, reason),) = world.hooks.ends
    assert state == "failed"
    assert reason == (
        f"{REASON}; all rollout workers refuse version 2, and have refused the 2 before it"
    )


async def test_an_accepted_version_in_between_excuses_those_before_it(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    for version in range(2 * MAX_WITHDRAWN):
        if version % 3 == 2:
            await ledger.versions.hear(serving=[version], refusals=[None])
        else:
            await refuse(ledger, version)
        await publish(ledger, 0, parent=version)
    await ledger.sweep()
    assert not world.hooks.ends


async def test_a_last_version_that_is_withdrawn_holds_no_end_up(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, stop={"steps": 1}, eval={"every": 5, "tasks": 2, "timeout_s": 50})
    ledger = await world.started()
    await refuse(ledger, 0)
    await publish(ledger, 0, parent=0)
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=9)
    await ledger.submit([world.made(each, 0, version=1) for each in leased])
    await world.filled(ledger, version=1)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
    assert await publish(ledger, 1, parent=1) == 2
    assert (await ledger.take(incarnation=1, step=1, rank=0, world=1)).stop == "finished"
    await refuse(ledger, 2)
    await ledger.sweep()
    await ledger.sweep()
    assert world.hooks.ends == [
        ("succeeded", "all steps are done; no rollout worker accepts version 2, the last one")
    ]


async def test_seeds_join_no_withdrawn_version(store: Store, worlds: Worlds) -> None:
    ledger = await worlds(store).started()
    found = await ledger.versions.of_step(0, incarnation=1)
    assert found is not None
    await refuse(ledger, 0)
    assert await ledger.versions.of_step(0, incarnation=1) is None
    await publish(ledger, 0, parent=0)
    found = await ledger.versions.of_step(0, incarnation=1)
    assert found is not None
    assert found.version == 1


class VersionsMachine(RuleBasedStateMachine):
    """Workers come, go, load versions and judge them; a trainer does as it is told.

    A worker that refuses a version may go on with the one that it has served before.
    """

    def __init__(self, socket: str, worlds: Worlds, *, max_staleness: int) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = Store(client_of(f"unix://{socket}"))
        self.run(self.store.command("FLUSHALL"))
        self.world: World = worlds(self.store, experience={"max_staleness": max_staleness})
        self.max_staleness = max_staleness
        self.workers: dict[str, tuple[int, WeightRefusal | None]] = {}
        self.served: set[int] = set()  # by any worker, when verdicts were heard
        self.refused: set[int] = set()  # by all workers at once, likewise
        self.step = 0
        self.version = 0
        self.steps = {0: 0}  # of versions

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(job)

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()

    @initialize(names=st.sets(st.sampled_from(WORKERS)), served=st.booleans())
    def begin(self, names: set[str], served: bool) -> None:
        """Some workers are there, and may have loaded the first version."""
        self.ledger = self.run(self.world.started())
        self.workers = dict.fromkeys(sorted(names), (0 if served else -1, None))

    @property
    def over(self) -> bool:
        return bool(self.world.hooks.ends)

    @rule(name=st.sampled_from(WORKERS))
    def join_or_leave(self, name: str) -> None:
        if self.workers.pop(name, None) is None:
            self.workers[name] = (-1, None)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), right=st.booleans(), goes_back=st.booleans())
    def load(self, data: st.DataObject, right: bool, goes_back: bool) -> None:
        """A worker whose refusal is final loads nothing until there is a newer version."""
        name = data.draw(st.sampled_from(sorted(self.workers)))
        before, refused = self.workers[name]
        if self.version in self.ledger.versions.withdrawn or (
            refused is not None and refused.version == self.version
        ):
            return
        kept = before if goes_back and before not in self.ledger.versions.withdrawn else -1
        self.workers[name] = (self.version, None) if right else (kept, refusal(self.version))

    @rule()
    def all_start_again_and_refuse(self) -> None:
        """Even one that has served the version is not heard to say so any more."""
        self.workers = {name: (-1, refusal(self.version)) for name in self.workers}
        self.hear()

    @rule()
    def hear(self) -> None:
        found = list(self.workers.values())
        serving = [version for version, _ in found]
        self.served |= {version for version in serving if version >= 0}
        refusals = [each for _, each in found]
        if found and all(each is not None and each.version == self.version for each in refusals):
            self.refused.add(self.version)
        self.run(self.ledger.versions.hear(serving=serving, refusals=refusals))
        self.run(self.ledger.sweep())

    @precondition(lambda self: not self.over)
    @rule()
    def train(self) -> None:
        """A step, if a worker serves a version that is new enough; else what the ledger says."""
        if usable := self.usable():
            self.run(self.world.filled(self.ledger, version=max(usable)))
        share = self.run(self.taken())
        if share is None:  # it would wait
            assert self.version not in self.ledger.versions.withdrawn
            return
        if share.publish_again:
            assert self.version in self.ledger.versions.withdrawn
        else:
            assert not share.stop
            assert not versions_of(share) & set(self.ledger.versions.withdrawn)
            self.run(
                self.ledger.commit(
                    incarnation=1, step=self.step, batch_id=share.batch_id, metrics={}
                )
            )
            self.step += 1
        published = self.run(publish(self.ledger, self.step, parent=self.version))
        assert published > self.version
        self.version = published
        self.steps[published] = self.step

    def usable(self) -> set[int]:
        """Versions with which workers sample what may still be trained on."""
        oldest = self.step - self.max_staleness
        serving = {version for version, _ in self.workers.values() if version >= 0}
        return {version for version in serving if self.steps[version] >= oldest}

    async def taken(self) -> BatchShare | None:
        take = self.ledger.take(incarnation=1, step=self.step, rank=0, world=1)
        task = asyncio.create_task(take)
        while not task.done() and not (await self.ledger.live()).waiting:
            await asyncio.sleep(0)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        return None

    @rule()
    def crash_of_ledger(self) -> None:
        self.ledger = self.run(self.world.opened())

    @invariant()
    def verdicts_are_those_of_the_workers(self) -> None:
        versions = self.ledger.versions
        assert versions.accepted == max(self.served, default=-1)
        assert set(versions.withdrawn) == {v for v in self.refused if v > versions.accepted}
        assert self.over == (len(versions.withdrawn) >= MAX_WITHDRAWN)
        report = self.run(self.ledger.verify())
        assert report.ok, report.problems


@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_verdicts_in_any_order(redis_socket: str, worlds: Worlds, max_staleness: int) -> None:
    class Machine(VersionsMachine):
        def __init__(self) -> None:
            super().__init__(redis_socket, worlds, max_staleness=max_staleness)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
