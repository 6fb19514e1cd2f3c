"""What a trainer has died of, and how often since it last got on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from paceline_experience.ledger.failures import Failures

if TYPE_CHECKING:
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import Worlds


async def test_attempts_without_progress_are_counted_across_restarts(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    assert await ledger.report_failure(incarnation=1, reason="why") == (1, "why")
    assert await ledger.report_failure(incarnation=0, reason="a consequence") == (1, "why")
    for lives in (2, 3):
        ledger = await world.opened()
        await ledger.grant_incarnation()
        assert await ledger.report_failure(incarnation=1, reason="late") == (lives - 1, "why")
        assert await ledger.report_failure(incarnation=0, reason="why") == (lives, "why")
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=0)
    await ledger.publish_version(incarnation=incarnation, step=0, parent=0, num_bytes=1)
    await world.filled(ledger)
    await world.trained(ledger, 0, incarnation=incarnation)
    assert await ledger.report_failure(incarnation=0, reason="new") == (1, "new")
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=0)
    assert await ledger.report_failure(incarnation=incarnation, reason="again") == (2, "again")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_failures_are_counted_since_the_best_step(told: list[tuple[bool, int]]) -> None:
    """Each is a new life or one that is told of again, at a step."""
    failures, newest = Failures(), 1
    best, lives = -1, 0
    for again, step in told:
        if not (again and lives):
            newest += bool(lives)
            lives, best = (1 if step > best else lives + 1), max(step, best)
        failures = failures.record(newest, newest=newest, step=step, reason="x")
        assert (failures.count, failures.best_step) == (lives, best)
