"""Leases: admission, expiry, progress, giving back, late and double submissions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from paceline.enums import GiveBackReason, ScoreStatus
from paceline.errors import StoreError
from paceline.types import EpisodeProgress
from paceline_experience.ledger.ledger import EpisodeKey

if TYPE_CHECKING:
    from paceline.types import Assignment
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import Worlds


def keys(
    assignment: Assignment, reason: GiveBackReason | None = None, detail: str = ""
) -> list[EpisodeKey]:
    pairs = zip(assignment.indices, assignment.attempts, strict=True)
    return [EpisodeKey(assignment.group_id, i, a, reason, detail) for i, a in pairs]


async def test_nothing_is_admitted_before_the_first_version(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.opened()
    assert await ledger.leases.lease(worker_id="w", train=8, evals=0) == []
    woken = ledger.wakeup()
    await ledger.grant_incarnation()
    await ledger.publish_version(incarnation=1, step=0, parent=-1, num_bytes=1)
    assert woken.is_set()
    assert len(await ledger.leases.lease(worker_id="w", train=8, evals=0)) == 4
    assert world.hooks.runs == 1


async def test_admission_stops_at_the_bound_and_resumes_with_the_step(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    leased = await world.filled(ledger)
    assert [a.group_id for a in leased] == ["j1.0", "j1.1", "j1.2", "j1.3"]
    assert await ledger.leases.lease(worker_id="w", train=8, evals=0) == []
    woken = ledger.wakeup()
    await world.trained(ledger, 0)
    assert woken.is_set()
    assert len(await ledger.leases.lease(worker_id="w", train=8, evals=0)) == 2


async def test_admission_waits_for_weights_on_their_way(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    ledger.serve([0, -1])
    await world.filled(ledger)
    await world.trained(ledger, 0)
    assert await ledger.leases.lease(worker_id="w", train=8, evals=0) == []
    woken = ledger.wakeup()
    ledger.serve([1])
    assert woken.is_set()
    assert len(await ledger.leases.lease(worker_id="w", train=8, evals=0)) == 2


async def test_single_credits_do_not_tear_groups_apart(store: Store, worlds: Worlds) -> None:
    ledger = await worlds(store).started()
    [part] = await ledger.leases.lease(worker_id="tiny", train=1, evals=0)
    assert part.indices == (0,)
    [rest] = await ledger.leases.lease(worker_id="big", train=1, evals=0)
    assert (rest.group_id, rest.indices) == (part.group_id, (1,))
    assert await ledger.leases.lease(worker_id="big", train=1, evals=0) == []
    [whole] = await ledger.leases.lease(worker_id="big", train=3, evals=0)
    assert whole.indices == (0, 1)


async def test_an_expired_lease_comes_again_with_its_progress(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    first, _ = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    so_far = world.made(first, 1).transcripts
    told = EpisodeProgress(first.group_id, 1, 1, so_far, actions=("left",))
    world.clock.advance(6)
    assert await ledger.renew(worker_id="w", keys=[], progress=[told]) == []
    world.clock.advance(6)
    await ledger.sweep()
    again, other = await ledger.leases.lease(worker_id="v", train=3, evals=0)
    assert (again.group_id, again.indices, again.attempts) == (first.group_id, (0,), (2,))
    assert (other.indices, other.attempts) == ((0, 1), (2, 2))
    world.clock.advance(6)
    await ledger.sweep()
    [late] = await ledger.leases.lease(worker_id="v", train=1, evals=0)
    assert (late.indices, late.attempts) == ((1,), (2,))
    [kept] = late.progress
    assert (kept.attempt, kept.actions) == (2, ("left",))
    assert [t.tokens for t in kept.transcripts] == [t.tokens for t in so_far]
    assert await ledger.renew(worker_id="w", keys=keys(first), progress=[]) == keys(first)
    await world.clean(ledger)


async def test_first_finished_attempt_wins(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    [old] = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    world.clock.advance(11)
    await ledger.sweep()
    [new] = await ledger.leases.lease(worker_id="v", train=2, evals=0)
    assert await ledger.submit([world.made(old, 0, reward=1.0)]) == ["accepted"]
    assert await ledger.submit([world.made(new, 0)]) == ["superseded"]
    assert await ledger.submit([world.made(new, 1), world.made(old, 1)]) == [
        "accepted",
        "superseded",
    ]
    assert await ledger.submit([world.made(new, 1)]) == ["duplicate"]
    assert (await world.clean(ledger))["ready"] == 2


async def test_an_attempt_that_was_never_leased_writes_nothing(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    [leased] = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    for attempt in (-1, 0, leased.attempts[0] + 1):
        forged = replace(world.made(leased, 0), attempt=attempt)
        assert await ledger.submit([forged]) == ["dropped"]
    assert (await world.clean(ledger))["leased"] == 2
    assert await ledger.submit([world.made(leased, 0)]) == ["accepted"]


async def test_a_result_after_expiry_is_taken(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    [old] = await ledger.leases.lease(worker_id="w", train=2, evals=0)
    world.clock.advance(11)
    await ledger.sweep()
    assert await ledger.submit(world.whole([old])) == ["accepted", "accepted"]
    assert (await world.clean(ledger))["ready"] == 2


@pytest.mark.parametrize("how", ["submit", "nan", "give_back"])
async def test_infrastructure_failures_are_retried_then_the_group_is_dropped(
    store: Store, worlds: Worlds, how: str
) -> None:
    world = worlds(store)
    ledger = await world.started()
    for attempt in (1, 2, 3):
        leased = await ledger.leases.lease(worker_id="w", train=2, evals=0)
        broken = leased[0]
        assert broken.attempts[0] == attempt
        if how == "give_back":
            why = f"reward: attempt {attempt}"
            key = EpisodeKey(broken.group_id, 0, attempt, GiveBackReason.INFRA_ERROR, why)
            await ledger.give_back(worker_id="w", keys=[key])
            continue
        status = ScoreStatus.INFRA_ERROR if how == "submit" else ScoreStatus.OK
        bad = world.made(broken, 0, reward=float("nan"), status=status)
        expected = "requeued" if attempt < 3 else "dropped"
        assert await ledger.submit([bad]) == [expected]
    counts = await world.clean(ledger)
    assert (counts["exhausted_attempts"], counts["group_failed"]) == (1, 1)
    live = await ledger.live()
    last = "reward: attempt 3" if how == "give_back" else ""
    assert (live.failed_attempts, live.last_failure) == (3, last)


async def test_a_drain_uses_up_no_attempt(store: Store, worlds: Worlds) -> None:
    """Nor does it give back those that failures have used up."""
    world = worlds(store)
    ledger = await world.started()
    failed, drained = GiveBackReason.INFRA_ERROR, GiveBackReason.DRAIN
    reasons = [failed, *[drained] * 4, failed, drained, failed]
    failures = 0
    for attempt, reason in enumerate(reasons, 1):
        [leased] = await ledger.leases.lease(worker_id="w", train=2, evals=0)
        assert leased.attempts == (attempt,) * len(leased.attempts)
        given = [EpisodeKey(leased.group_id, i, attempt, reason) for i in leased.indices]
        await ledger.give_back(worker_id="w", keys=given)
        failures += len(given) if reason is failed else 0
    assert (await world.clean(ledger))["exhausted_attempts"] == 1
    assert (await ledger.live()).failed_attempts == failures


async def test_a_task_that_infrastructure_failed_on_is_not_consumed(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, num_tasks=1, tasks={"environment": "x", "epochs": 1})
    ledger = await world.started()
    seen: list[str] = []
    for _ in range(6):
        [broken] = await ledger.leases.lease(worker_id="w", train=2, evals=0)
        seen.append(broken.group_id)
        await ledger.give_back(worker_id="w", keys=keys(broken, GiveBackReason.INFRA_ERROR))
    assert seen == ["j1.0"] * 3 + ["j1.0.1"] * 3
    assert await ledger.leases.lease(worker_id="w", train=2, evals=0) == []


async def test_invalid_drops_the_group(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    first, _ = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    await ledger.submit([world.made(first, 1)])
    await ledger.give_back(
        worker_id="w", keys=keys(first, GiveBackReason.INVALID, "prompt too long")[:1]
    )
    counts = await world.clean(ledger)
    assert (counts["invalid"], counts["leased"]) == (2, 2)
    assert await ledger.submit([world.made(first, 0)]) == ["dropped"]


async def test_a_job_without_any_valid_task_fails(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    for assignment in leased:
        await ledger.give_back(
            worker_id="w", keys=keys(assignment, GiveBackReason.INVALID, "too long")
        )
    assert world.hooks.ends == [("failed", "too long")]
    await world.clean(ledger)


async def test_a_job_whose_tasks_cannot_be_run_any_more_fails(store: Store, worlds: Worlds) -> None:
    """One valid group in between, and the count begins anew, also after a restart."""
    world = worlds(store)
    ledger = await world.started()

    async def spoil(number: int) -> None:
        for _ in range(number):
            (assignment,) = await ledger.leases.lease(worker_id="w", train=2, evals=0)
            await ledger.give_back(
                worker_id="w", keys=keys(assignment, GiveBackReason.INVALID, "the template hangs")
            )

    await ledger.submit(world.whole(await ledger.leases.lease(worker_id="w", train=2, evals=0)))
    await spoil(63)
    await ledger.submit(world.whole(await ledger.leases.lease(worker_id="w", train=2, evals=0)))
    await spoil(60)
    ledger = await world.opened()
    await spoil(3)
    assert world.hooks.ends == []
    await spoil(1)
    reason = "the last 64 tasks could not be run: the template hangs"
    assert world.hooks.ends == [("failed", reason)]
    await world.clean(ledger)


async def test_an_unreported_failure_is_reported_after_a_restart(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    world.hooks.deaf = True
    *others, last = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    for assignment in others:
        await ledger.give_back(
            worker_id="w", keys=keys(assignment, GiveBackReason.INVALID, "too long")
        )
    with pytest.raises(StoreError):
        await ledger.give_back(worker_id="w", keys=keys(last, GiveBackReason.INVALID, "too long"))
    world.hooks.deaf = False
    ledger = await world.opened()
    await ledger.sweep()
    await ledger.sweep()
    assert world.hooks.ends == [("failed", "too long")]


async def test_capacity_freed_by_finished_episodes_wakes_waiting_workers(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, experience={"max_in_flight": 2})
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    assert [len(each.indices) for each in leased] == [2]
    woken = ledger.wakeup()
    await ledger.submit(world.whole(leased))
    await ledger.sweep()
    assert woken.is_set()


async def test_leases_survive_a_restart_of_the_ledger(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    world.clock.advance(9)
    ledger = await world.opened()
    world.clock.advance(9)
    await ledger.sweep()
    assert await ledger.renew(worker_id="w", keys=keys(leased[0]), progress=[]) == []
    assert set(await ledger.submit(world.whole(leased))) == {"accepted"}
    await world.clean(ledger)


async def test_stragglers_are_dropped_once_the_trainer_waited(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience={"straggler_timeout_s": 5.0, "lease_s": 100.0})
    ledger = await world.started()
    slow, *rest = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    told = EpisodeProgress(slow.group_id, 0, 1, world.made(slow, 0, version=0).transcripts)
    await ledger.renew(worker_id="w", keys=[], progress=[told])
    await ledger.submit(world.whole(rest))
    await world.trained(ledger, 0)
    await ledger.submit(
        world.whole(await ledger.leases.lease(worker_id="w", train=9, evals=0), version=1)
    )
    await world.trained(ledger, 1)
    new = await ledger.leases.lease(worker_id="w", train=9, evals=0)
    trainer = await world.waiting(ledger, 2)
    world.clock.advance(4)
    await ledger.sweep()
    assert (await world.clean(ledger)).get("stale", 0) == 0
    world.clock.advance(2)
    await ledger.sweep()
    assert (await world.clean(ledger))["stale"] == 2
    assert await ledger.renew(worker_id="w", keys=keys(slow), progress=[]) == keys(slow)
    assert len(new) == 2
    await ledger.submit(world.whole(new, version=2))
    assert (await trainer).stats.staleness_max == 1


async def test_what_a_gone_worker_had_is_handed_out_again(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    (first, second) = await ledger.leases.lease(worker_id="a", train=4, evals=0)
    (other,) = await ledger.leases.lease(worker_id="b", train=2, evals=0)
    assert sorted(ledger.holders()) == ["a", "b"]
    assert await ledger.leases.release(worker_id="a", unless=lambda: True) == 0
    woken = ledger.wakeup()
    assert await ledger.leases.release(worker_id="a", keep=keys(second)) == 2
    assert woken.is_set()
    assert await ledger.leases.release(worker_id="a", keep=keys(second)) == 0
    assert (ledger.held("a"), ledger.held("b")) == (2, 2)
    (again,) = await ledger.leases.lease(worker_id="b", train=2, evals=0)
    assert (again.group_id, again.attempts) == (first.group_id, (2, 2))
    # The first worker was only cut off: it is told to stop, and does no harm until then.
    lost = await ledger.renew(worker_id="a", keys=[*keys(first), *keys(second)], progress=[])
    assert lost == keys(first)
    assert await ledger.submit([world.made(again, 0)]) == ["accepted"]
    assert await ledger.submit([world.made(first, 0)]) == ["superseded"]
    assert await ledger.submit(world.whole([second, other])) == ["accepted"] * 4
    await world.clean(ledger)
