"""Random histories of the ledger: the books balance after every step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import uvloop
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.enums import GiveBackReason, ScoreStatus
from paceline.plugins import registry
from paceline.testing.filters import finished_group
from paceline.types import Assignment, EpisodeProgress
from paceline.v1 import experience_pb2 as pb
from paceline_experience.ledger.ledger import BatchShare, EpisodeKey
from paceline_experience.ledger.replay.pool import Pool
from paceline_experience.ledger.state import parse_group, parse_results
from paceline_experience.ledger.verification import VerificationReport
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store, client_of
from paceline_experience.store.watermarks import Watermarks
from paceline_harness.servers.store_contents import put_back

if TYPE_CHECKING:
    from paceline_harness.ledgers.world import Worlds

T = TypeVar("T")
Lease = tuple[Assignment, int]  # an assignment and a place in it
B, S, G = 2, 1, 3
STEPS = int(os.environ.get("PACELINE_LEDGER_STEPS", "1000"))
LENGTH, MEAN_LENGTH = 50, 35  # of a history at most, and of most of them at least
COUNTED = "steps checked: "  # the benchmark reads it
POOL = {"per_task": 3, "pool_bytes": 4 << 10}  # about six episodes
WORKERS = st.sampled_from(["w1", "w2"])
# One that is denied ends its job, which tests of their own say.
REASONS = [reason for reason in GiveBackReason if reason is not GiveBackReason.DENIED]


@dataclass(frozen=True, slots=True)
class Moment:
    """What the store held, and what was true then."""

    content: dict[bytes, bytes]
    step: int
    durable: int
    fixed: dict[int, set[tuple[str, int]]]
    lineage: dict[int, set[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class Found:
    """What is in the store after a step; `content` is all of it, as `DUMP` has it."""

    memory: dict[bytes, bytes]
    groups: dict[bytes, bytes]
    results: dict[bytes, bytes]
    replay: dict[bytes, bytes]
    ring: list[bytes]
    samples: list[bytes]
    payloads: list[bytes]
    content: dict[bytes, bytes]


class LedgerMachine(RuleBasedStateMachine):
    """Everything that workers, trainer and time may do, in any order."""

    def __init__(self, socket: str, worlds: Worlds) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.store = Store(client_of(f"unix://{socket}"))
        self.run(self.store.command("FLUSHALL"))
        self.worlds = worlds
        self.moments: list[Moment] = []
        self.num_checks = 0
        self.granted, self.published = {1}, {0}
        self.incarnation, self.step, self.durable, self.version = 1, 0, 0, 0
        self.known: list[Lease] = []
        self.tasks: dict[str, int] = {}  # positions, by group
        self.taken: BatchShare | None = None
        self.fixed: dict[int, set[tuple[str, int]]] = {}
        self.lineage: dict[int, set[tuple[str, int]]] = {}

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(job)

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()

    @rule(worker=WORKERS, credits=st.integers(1, 12))
    def lease(self, worker: str, credits: int) -> None:
        before = self.run(self.ledger.live())
        got = self.run(self.ledger.leases.lease(worker_id=worker, train=credits, evals=0))
        assert sum(len(a.indices) for a in got) <= credits
        self.known += [(a, place) for a in got for place in range(len(a.indices))]
        self.tasks.update({a.group_id: a.task.seed for a in got})
        after = self.run(self.ledger.live())
        if after.counts["admitted"] > before.counts["admitted"]:
            accepted = self.ledger.counts["groups:accepted"]
            assert accepted + after.open_groups <= (S + self.step + 1) * B

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0, float("nan")]), lag=st.integers(0, 2))
    def submit(self, data: st.DataObject, reward: float, lag: int) -> None:
        some = data.draw(st.lists(st.sampled_from(self.known), min_size=1, max_size=6))
        status = data.draw(st.sampled_from([*["ok"] * 5, "infra_error"]))
        version = max(0, self.version - lag)
        items = [
            self.world.made(a, place, reward=reward, version=version, status=ScoreStatus(status))
            for a, place in some
        ]
        outcomes = self.run(self.ledger.submit(items))
        assert len(outcomes) == len(items)

    @rule(lag=st.integers(0, 1))
    def work_off(self, lag: int) -> None:
        got = self.run(self.ledger.leases.lease(worker_id="w3", train=12, evals=0))
        self.tasks.update({a.group_id: a.task.seed for a in got})
        items = self.world.whole(got, version=max(0, self.version - lag))
        outcomes = self.run(self.ledger.submit(items))
        assert set(outcomes) <= {"accepted"}

    @initialize(
        steps=st.integers(0, 3),
        filters=st.lists(st.integers(0, 99), max_size=2),
        sampler=st.sampled_from(["shuffle", "weakest"]),
        waves=st.none() | st.integers(0, 99),
        repair=st.none() | st.integers(0, 99),
        mode=st.sampled_from(["asynchronous", "april", "rollout_wise"]),
        replay=st.none() | st.integers(0, 99),
    )
    def begin(
        self,
        steps: int,
        filters: list[int],
        sampler: str,
        waves: int | None,
        repair: int | None,
        mode: str,
        replay: int | None,
    ) -> None:
        """Each filter keeps any part of a group, or nothing of it, as its seed says."""
        self.waves = waves is not None
        self.plain = waves is None and repair is None and replay is None
        named = [{"kind": "any_subset", "seed": seed} for seed in filters]
        if repair is not None:
            named.append({"kind": "any_repair", "seed": repair})
        experience = {
            "payload_bytes": 1 << 30,
            "samples": {"trained": 1, "dropped": 1, "total": 4},
            "group_size": G,
            "filters": named,
            "sampler": {"kind": sampler},
            "mode": mode,
            "allocator": {"kind": "any_waves", "seed": waves} if self.waves else None,
        }
        if replay is not None:
            experience["replay"] = {"kind": "any_replay", "seed": replay, **POOL}
        # Few tasks come again while their episodes are still stored.
        num_tasks = 1000 if replay is None else 5
        self.world = self.worlds(self.store, experience=experience, num_tasks=num_tasks)
        marks = Watermarks()  # on another disk than the store's
        self.world.watermarks = lambda: marks
        self.ledger = self.run(self.world.started())
        self.filters, self.any_subset = filters, registry.find("filters", "any_subset")
        for _ in range(steps):
            self.work_and_train()

    @rule()
    def work_and_train(self) -> None:
        self.work_off(0)
        if self.taken is None:
            self.take(1)
        if self.taken is not None:
            self.commit(False)
            self.announce()

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def give_back(self, data: st.DataObject, reason: GiveBackReason) -> None:
        a, place = data.draw(st.sampled_from(self.known))
        key = EpisodeKey(a.group_id, a.indices[place], a.attempts[place], reason, "said so")
        assume(reason not in {"invalid", "oversized"} or self.step > 0)
        self.run(self.ledger.give_back(worker_id="w1", keys=[key]))

    @rule(worker=WORKERS)
    def hand_over(self, worker: str) -> None:
        """The worker gives back what is recalled, if anything is."""
        keys = self.ledger.recalled(worker)
        self.run(self.ledger.give_back(worker_id=worker, keys=keys))
        assert not self.ledger.recalled(worker)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        a, place = data.draw(st.sampled_from(self.known))
        so_far = self.world.made(a, place, version=self.version).transcripts
        told = EpisodeProgress(a.group_id, a.indices[place], a.attempts[place], so_far)
        lost = self.run(self.ledger.renew(worker_id="w1", keys=[], progress=[told]))
        assert len(lost) <= 1

    @rule(worker=WORKERS, data=st.data())
    def release(self, worker: str, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.known), max_size=4)) if self.known else []
        kept = [EpisodeKey(a.group_id, a.indices[i], a.attempts[i]) for a, i in some]
        self.run(self.ledger.leases.release(worker_id=worker, keep=kept))
        assert self.ledger.held(worker) <= len(kept)

    @rule(seconds=st.sampled_from([1.0, 6.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.run(self.ledger.sweep())

    @precondition(lambda self: self.taken is None)
    @rule(world=st.integers(1, 3))
    def take(self, world: int) -> None:
        shares = self.run(self._take(world))
        if shares is None:
            return
        assert len({s.batch_id for s in shares}) == 1
        samples = [pb.TrainSample.FromString(x) for s in shares for x in s.samples]
        names = {(m.group_id, m.index) for m in samples}
        assert len(names) == len(samples)
        assert len({group for group, _ in names}) == B
        if self.plain:
            kept = {group: self.kept(group) for group, _ in names}
            assert names == {(group, i) for group, indices in kept.items() for i in indices}
        assert self.fixed.setdefault(self.step, names) == names
        self.taken = shares[0]

    def kept(self, group_id: str) -> list[int]:
        """Indices of the episodes that the filters keep of a group."""
        found = list(range(G))
        for seed in self.filters:
            group = finished_group([0.0] * len(found), task=self.tasks[group_id])
            found = [found[i] for i in self.any_subset(group, seed=seed).of(len(found))]
        return found

    async def _take(self, world: int) -> list[BatchShare] | None:
        async def one(rank: int) -> BatchShare:
            return await self.ledger.take(
                incarnation=self.incarnation, step=self.step, rank=rank, world=world
            )

        calls = asyncio.gather(*map(one, range(world)))
        while not calls.done() and not (await self.ledger.live()).waiting:
            await asyncio.sleep(0.001)
        if calls.done():
            return await calls
        calls.cancel()
        await asyncio.gather(calls, return_exceptions=True)
        return None

    @precondition(lambda self: self.taken is not None)
    @rule(twice=st.booleans())
    def commit(self, twice: bool) -> None:
        assert self.taken is not None
        for _ in range(2 if twice else 1):
            step, stop = self.run(
                self.ledger.commit(
                    incarnation=self.incarnation,
                    step=self.step,
                    batch_id=self.taken.batch_id,
                    metrics={},
                )
            )
            assert (step, stop) == (self.step + 1, None)
        names = self.fixed[self.step]
        assert not any(names & other for other in self.lineage.values())
        self.lineage[self.step] = names
        self.step, self.taken = self.step + 1, None

    @rule()
    def announce(self) -> None:
        made = self.run(
            self.ledger.publish_version(
                incarnation=self.incarnation, step=self.step, parent=self.version, num_bytes=1
            )
        )
        assert made.version == self.version or made.version > max(self.published)
        self.version = made.version

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        self.durable = data.draw(st.integers(self.durable, self.step))
        self.run(
            self.ledger.commit_checkpoint(incarnation=self.incarnation, step=self.durable, path="p")
        )

    @rule(data=st.data(), ledger_too=st.booleans())
    def crash_of_trainer(self, data: st.DataObject, ledger_too: bool) -> None:
        if ledger_too:
            self.ledger = self.run(self.world.opened())
        step = data.draw(st.integers(self.durable, self.step))
        self.incarnation = self.run(self.ledger.grant_incarnation())
        found, _ = self.run(self.ledger.rewind(incarnation=self.incarnation, step=step))
        assert found == step
        self.lineage = {k: v for k, v in self.lineage.items() if k < step}
        self.step, self.taken = step, None

    @precondition(lambda self: len(self.moments) > 1)
    @rule(data=st.data(), ledger_too=st.booleans())
    def store_goes_back(self, data: st.DataObject, ledger_too: bool) -> None:
        """It loses what was written last; the trainer starts again, and perhaps the ledger."""
        moment = data.draw(st.sampled_from(self.moments[:-1]))
        self.run(put_back(self.store, moment.content))
        self.step, self.durable, self.taken = moment.step, moment.durable, None
        self.fixed, self.lineage = dict(moment.fixed), dict(moment.lineage)
        if ledger_too:
            self.ledger = self.run(self.world.opened())
        self.run(self.ledger.sweep())
        self.incarnation = self.run(self.ledger.grant_incarnation())
        assert self.incarnation not in self.granted
        self.run(self.ledger.rewind(incarnation=self.incarnation, step=self.durable))
        self.lineage = {k: v for k, v in self.lineage.items() if k < self.durable}
        self.step = self.durable
        made = self.run(
            self.ledger.publish_version(
                incarnation=self.incarnation, step=self.step, parent=-1, num_bytes=1
            )
        )
        assert made.version > max(self.published)
        self.version = made.version
        self.moments.clear()

    @rule()
    def crash_of_ledger(self) -> None:
        self.ledger = self.run(self.world.opened())

    @invariant()
    def books_balance(self) -> None:
        """One round trip for all that is read here: most of the time of a step is its commands."""
        report, found = self.run(self._observe())
        self.num_checks += 1
        assert report.ok, report.problems
        assert not self.world.hooks.ends
        seen = {key: int(count) for key, count in found.memory.items() if b"/seen" in key}
        assert set(seen.values()) <= {1}, f"a draw was observed twice: {seen}"
        assert len(found.samples) <= 4
        assert {name.decode() for name in found.payloads} <= needed(found)
        self.granted.add(self.incarnation)
        self.published.add(self.version)
        now = Moment(found.content, self.step, self.durable, dict(self.fixed), dict(self.lineage))
        self.moments = [*self.moments[-4:], now]

    async def _observe(self) -> tuple[VerificationReport, Found]:
        report = await self.ledger.verify()
        keys = JobKeys("default", "j1")
        names: list[bytes] = await self.store.command("KEYS", "*")
        async with self.store.redis.pipeline(transaction=False) as pipe:
            for name in (keys.memory, keys.groups, keys.results, keys.replay):
                pipe.hgetall(name)
            for name in (keys.ring, keys.samples):
                pipe.zrange(name, 0, -1)
            pipe.hkeys(keys.payloads)
            for name in names:
                pipe.execute_command("DUMP", name)
            read = await pipe.execute()
        return report, Found(*read[:7], content=dict(zip(names, read[7:], strict=True)))


def needed(found: Found) -> set[str]:
    """Payloads of stored groups and their guests, of a list, of the samples, and of the pool."""
    results = parse_results(found.results.keys(), found.results.values())
    records = [parse_group(k.decode(), v, results=results) for k, v in found.groups.items()]
    own = {name for record in records for name in record.member_payloads()}
    listed = {name.decode() for name in [*found.ring, *found.samples]}
    return own | Pool(found.replay).payloads | listed


@pytest.mark.slow
@pytest.mark.timeout(max(1800, STEPS))
def test_books_balance_in_any_history(redis_socket: str, worlds: Worlds) -> None:
    """As many steps as `PACELINE_LEDGER_STEPS` says; `make bench-ledger-histories` takes more."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    taken = 0

    class Machine(LedgerMachine):
        def __init__(self) -> None:
            super().__init__(redis_socket, worlds)

        def teardown(self) -> None:
            nonlocal taken
            taken += self.num_checks
            super().teardown()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=-(-STEPS // MEAN_LENGTH),
            stateful_step_count=LENGTH,
            deadline=None,
            suppress_health_check=checks,
        ),
    )
    print(f"{COUNTED}{taken}")
