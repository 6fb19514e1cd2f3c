"""A job all of whose attempts fail tries again ever less often, like `CrashLoopBackOff` of pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import GiveBackReason
from paceline_experience.ledger.generation.back_off import FREE_FAILURES, LONGEST_S, BackOff
from paceline_experience.ledger.generation.submission import Report, Verdict
from paceline_experience.ledger.ledger import EpisodeKey
from paceline_harness.runtime import FakeClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.types import Assignment
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds


async def failing(world: World, ledger: JobLedger) -> int:
    """Lease and fail until nothing can be leased; returns how many attempts failed."""
    count = 0
    while leased := await ledger.leases.lease(worker_id="w", train=8, evals=0):
        failed = keys(leased)
        await ledger.give_back(worker_id="w", keys=failed)
        count += len(failed)
    return count


def keys(leased: Sequence[Assignment]) -> list[EpisodeKey]:
    return [
        EpisodeKey(each.group_id, i, a, GiveBackReason.INFRA_ERROR, "reward: KeyError")
        for each in leased
        for i, a in zip(each.indices, each.attempts, strict=True)
    ]


async def test_attempts_wait_ever_longer_until_one_succeeds(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval={"every": 2, "tasks": 3})
    ledger = await world.started()
    assert FREE_FAILURES <= await failing(world, ledger) < FREE_FAILURES + 8
    waits = list[float]()
    for _ in range(7):
        live = await ledger.live()
        assert ledger.leases.demand().queued == ledger.leases.demand().new == 0
        assert ledger.leases.demand().eval_queued == 3  # these are not tried for ever
        waits.append(live.back_off_s)
        world.clock.advance(live.back_off_s)
        woken = ledger.wakeup()
        await ledger.sweep()
        assert woken.is_set()
        assert 0 < await failing(world, ledger) <= 8
    assert waits == [1, 2, 4, 8, 16, LONGEST_S, LONGEST_S]
    world.clock.advance(LONGEST_S)
    first, *others = await ledger.leases.lease(worker_id="w", train=8, evals=0)
    await ledger.give_back(worker_id="w", keys=keys(others))
    assert (await ledger.live()).back_off_s == LONGEST_S
    woken = ledger.wakeup()
    await ledger.submit(world.whole([first]))  # it had begun before
    assert woken.is_set()
    assert (await ledger.live()).back_off_s == 0
    assert await ledger.leases.lease(worker_id="w", train=8, evals=0)


async def test_a_worker_that_is_gone_is_no_failure_of_the_job(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    for lost in range(2 * FREE_FAILURES):
        assert await ledger.leases.lease(worker_id="w", train=8, evals=0)
        if lost % 2:
            await ledger.leases.release(worker_id="w")
        else:
            world.clock.advance(11)
            await ledger.sweep()
    assert (await ledger.live()).back_off_s == 0


def failures(first: int, count: int, verdict: Verdict = Verdict.REQUEUE) -> list[Report]:
    return [Report("job.1", 0, first + n, verdict, "down") for n in range(count)]


def test_attempts_that_had_begun_before_a_pause_lead_to_no_other() -> None:
    clock, leased = FakeClock(), 200
    back_off = BackOff("job", clock, lambda: leased)
    back_off.note(failures(0, 199))
    assert back_off.left_s == 0  # all that are under way may fail once
    back_off.note(failures(199, 1))
    assert back_off.left_s == 1
    for number in range(200, 300):
        clock.pass_s(0.5)
        back_off.note(failures(number, 1))
    assert back_off.left_s == 0
    back_off.begun([("job.1", 0, 300)])
    back_off.note(failures(300, 1))
    assert back_off.left_s == 2


def test_what_would_fail_again_and_is_not_tried_again_counts_for_nothing() -> None:
    back_off = BackOff("job", FakeClock(), lambda: 0)
    for verdict in (Verdict.INVALID, Verdict.OVERSIZED, Verdict.DRAIN, Verdict.GONE):
        back_off.note(failures(0, 1000, verdict))
        assert back_off.left_s == 0


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(Verdict), max_size=9), st.floats(0, 60)), max_size=80
    )
)
def test_no_job_with_a_success_waits_and_no_pause_is_longer_than_the_longest(
    history: list[tuple[list[Verdict], float]],
) -> None:
    clock = FakeClock()
    back_off = BackOff("job", clock, lambda: 8)
    failed = number = 0
    for verdicts, seconds in history:
        before = back_off.left_s
        reports = [Report("job.1", 0, number + n, each) for n, each in enumerate(verdicts)]
        number += len(reports)
        back_off.begun(each.attempt_key for each in reports)
        ended = back_off.note(reports)
        failed += verdicts.count(Verdict.REQUEUE)
        if Verdict.OK in verdicts:
            failed = 0
            assert ended == (before > 0)
        if failed < FREE_FAILURES:
            assert back_off.left_s == 0
        assert back_off.left_s <= LONGEST_S
        assert before == 0 or back_off.left_s in (0, before)
        clock.pass_s(seconds)
