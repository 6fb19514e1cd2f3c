"""Random histories of evaluations: each result is that of the samples that were accepted."""

from __future__ import annotations

import asyncio
from collections import Counter
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

from paceline.config.limits import LimitSettings
from paceline.enums import GiveBackReason
from paceline.types import Assignment
from paceline_experience.ledger.ledger import EpisodeKey
from paceline_experience.store.store import Store, client_of

if TYPE_CHECKING:
    from paceline_harness.ledgers.world import Worlds

T = TypeVar("T")
Lease = tuple[Assignment, int]  # an assignment and a place in it
SAMPLES = 3
# One that is denied ends its job, which tests of their own say.
REASONS = [reason for reason in GiveBackReason if reason is not GiveBackReason.DENIED]
EVALS: dict[str, Any] = {
    "one": {"every": 1, "tasks": 5, "timeout_s": 30},
    "some": {
        "every": 2,
        "tasks": 4,
        "samples": SAMPLES,
        "temperature": 1.0,
        "pass_at": [1, SAMPLES],
        "timeout_s": 30,
    },
}


class EvalsMachine(RuleBasedStateMachine):
    """Workers measure, give back, fall silent; the trainer publishes; the ledger restarts."""

    def __init__(self, socket: str, worlds: Worlds) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = Store(client_of(f"unix://{socket}"))
        self.run(self.store.command("FLUSHALL"))
        self.worlds = worlds
        self.known: list[Lease] = []
        self.rewards: dict[str, dict[int, float]] = {}  # accepted, by group and index
        self.step = 0

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(job)

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()

    @initialize(window=st.integers(1, 16), main=st.booleans())
    def begin(self, window: int, main: bool) -> None:
        eval = {"every": 3, "tasks": 2} if main else None
        self.world = self.worlds(self.store, eval=eval, evals=EVALS)
        self.world.num_eval_tasks = 5
        self.world.limits = LimitSettings(eval_window=window)
        self.ledger = self.run(self.world.started())

    @rule(credits=st.integers(1, 12))
    def lease(self, credits: int) -> None:
        got = self.run(self.ledger.leases.lease(worker_id="w", train=0, evals=credits))
        assert sum(len(a.indices) for a in got) <= credits
        live = self.run(self.ledger.live())
        for assignment in got:
            assert live.eval is not None
            assert assignment.eval_set == live.eval.name
            assert assignment.pinned_version == live.eval.version
        self.known += [(a, place) for a in got for place in range(len(a.indices))]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.5, 1.0]))
    def submit(self, data: st.DataObject, reward: float) -> None:
        some = data.draw(st.lists(st.sampled_from(self.known), min_size=1, max_size=12))
        items = [self.world.made(a, i, reward=reward, version=a.pinned_version) for a, i in some]
        for item, outcome in zip(items, self.run(self.ledger.submit(items)), strict=True):
            if outcome == "accepted":
                assert item.index not in self.rewards.setdefault(item.group_id, {})
                self.rewards[item.group_id][item.index] = reward

    @rule(reward=st.sampled_from([0.0, 1.0]))
    def work_off(self, reward: float) -> None:
        """As much as is there."""
        self.known = self.known[-12:]
        self.lease(12)
        items = [
            self.world.made(a, i, reward=reward, version=a.pinned_version) for a, i in self.known
        ]
        for item, outcome in zip(items, self.run(self.ledger.submit(items)), strict=True):
            if outcome == "accepted":
                self.rewards.setdefault(item.group_id, {})[item.index] = reward

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def give_back(self, data: st.DataObject, reason: GiveBackReason) -> None:
        a, place = data.draw(st.sampled_from(self.known))
        key = EpisodeKey(a.group_id, a.indices[place], a.attempts[place], reason, "said so")
        self.run(self.ledger.give_back(worker_id="w", keys=[key]))

    @rule(seconds=st.sampled_from([1.0, 11.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.run(self.ledger.sweep())

    @rule()
    def train(self) -> None:
        live = self.run(self.ledger.live())
        self.run(self.world.filled(self.ledger, version=live.version))
        self.run(self.world.trained(self.ledger, self.step))
        self.step += 1

    @rule()
    def crash_of_ledger(self) -> None:
        self.ledger = self.run(self.world.opened())

    @invariant()
    def results_are_those_of_the_samples(self) -> None:
        report = self.run(self.ledger.verify())
        assert report.ok, report.problems
        self.run(self.world.hooks.recorded())
        found = [values for _, values in self.world.hooks.of("eval")]
        seen = Counter((row["version"], row.get("set", "")) for row in found)
        assert not seen or max(seen.values()) == 1
        for row in found:
            assert row["measured"] + row["dropped"] == row["of"]
            self.check(row)

    def check(self, row: dict[str, Any]) -> None:
        name = row.get("set", "")
        samples = SAMPLES if name == "some" else 1
        prefix = f"j1.e{row['version']}-{name}." if name else f"j1.e{row['version']}."
        whole = [
            list(rewards.values())
            for group, rewards in self.rewards.items()
            if group.startswith(prefix) and len(rewards) == samples
        ]
        assert row["measured"] == len(whole)
        if not whole:
            assert row["reward"] is None
            return
        assert row["reward"] == pytest.approx(sum(map(sum, whole)) / samples / len(whole))
        if name == "some":
            passed = sum(max(each) >= 1.0 for each in whole)
            assert row[f"pass@{SAMPLES}"] == pytest.approx(passed / len(whole))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("histories", [15, pytest.param(100, marks=pytest.mark.extended)])
def test_results_are_right_in_any_history(
    redis_socket: str, worlds: Worlds, histories: int
) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

    class Machine(EvalsMachine):
        def __init__(self) -> None:
            super().__init__(redis_socket, worlds)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=checks,
        ),
    )
