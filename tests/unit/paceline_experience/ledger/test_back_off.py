"""A job all of whose attempts fail tries again ever less often, like `CrashLoopBackOff` of pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import GiveBackReason
from paceline_experience.ledger.generation.back_off import FREE_FAILURES, LONGEST_S, BackOff
from paceline_experience.ledger.generation.submission import FAILURES, Report, Verdict
from paceline_experience.ledger.ledger import EpisodeKey
from paceline_harness.runtime import FakeClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conftest import World, Worlds

    from paceline.types import Assignment
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store


async def failing(world: World, ledger: JobLedger) -> int:
    """Lease and fail until nothing can be leased; returns how many attempts failed."""
    count = 0
    while leased := await ledger.lease(worker_id="w", train=8, evals=8):
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
    world = worlds(store)
    ledger = await world.started()
    assert FREE_FAILURES <= await failing(world, ledger) < FREE_FAILURES + 8
    waits = list[float]()
    for _ in range(7):
        live = await ledger.live()
        assert ledger.demand().queued == ledger.demand().new == ledger.demand().eval_queued == 0
        waits.append(live.back_off_s)
        world.clock.advance(live.back_off_s)
        woken = ledger.wakeup()
        await ledger.sweep()
        assert woken.is_set()
        assert 0 < await failing(world, ledger) <= 8
    assert waits == [1, 2, 4, 8, 16, LONGEST_S, LONGEST_S]
    world.clock.advance(LONGEST_S)
    first, *others = await ledger.lease(worker_id="w", train=8, evals=0)
    await ledger.give_back(worker_id="w", keys=keys(others))
    assert (await ledger.live()).back_off_s == LONGEST_S
    woken = ledger.wakeup()
    await ledger.submit(world.whole([first]))  # it had begun before
    assert woken.is_set()
    assert (await ledger.live()).back_off_s == 0
    assert await ledger.lease(worker_id="w", train=8, evals=0)


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(Verdict), max_size=9), st.floats(0, 60)), max_size=80
    )
)
def test_no_job_with_a_success_waits_and_no_pause_is_longer_than_the_longest(
    history: list[tuple[list[Verdict], float]],
) -> None:
    clock = FakeClock()
    back_off = BackOff("job", clock)
    failures = 0
    for verdicts, seconds in history:
        before = back_off.left_s
        back_off.note([Report("job.1", 0, 1, each) for each in verdicts])
        failures += sum(each in FAILURES for each in verdicts)
        if Verdict.OK in verdicts:
            failures = 0
        if failures < FREE_FAILURES:
            assert back_off.left_s == 0
        assert back_off.left_s <= LONGEST_S
        assert before == 0 or back_off.left_s in (0, before)
        clock.pass_s(seconds)
