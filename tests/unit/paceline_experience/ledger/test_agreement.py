"""Workers that the trainer does not agree with: who is named, and who is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.types import WorkerMismatch
from paceline_experience.store.store import Store

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_harness.ledgers.world import Worlds


def check(
    worker: str, version: int, *, since: int | None = None, at_fault: bool = False
) -> WorkerMismatch:
    kl = 0.0 if since is None else 0.7
    return WorkerMismatch(worker, version, kl, 0.05, since, at_fault)


async def named(ledger: JobLedger) -> str:
    return (await ledger.live()).disagreement


async def test_a_worker_is_named_while_it_disagrees_and_with_the_same_words(
    store: Store, worlds: Worlds
) -> None:
    ledger = await worlds(store).started()
    ledger.agreement.hear([check("a", 3, since=3), check("b", 3)])
    words = await named(ledger)
    assert words.startswith("rollout: a (since version 3): ")
    assert words.endswith("agrees with 1 other workers")
    for version in (4, 5, 6):
        ledger.agreement.hear([check("a", version, since=version - 1)])
        assert await named(ledger) == words
    ledger.agreement.hear([check("a", 7)])
    assert not await named(ledger)


async def test_a_worker_that_is_gone_is_named_no_more(store: Store, worlds: Worlds) -> None:
    ledger = await worlds(store).started()
    ledger.agreement.hear([check("a", 3, since=3, at_fault=True)])
    ledger.agreement.keep(["b"])
    assert not await named(ledger)
    assert not ledger.agreement.take_fault("a")


async def test_a_fault_is_told_once_and_not_for_what_a_former_life_has_sampled(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store)
    ledger = await world.started()
    (newest,) = [each.version for each in ledger.versions.listed()]
    ledger.agreement.hear([check("a", newest, since=newest, at_fault=True)])
    assert "mismatch_kl is 0.7, allowed 0.05" in ledger.agreement.take_fault("a")
    assert not ledger.agreement.take_fault("a")
    old = [check("a", newest, since=newest, at_fault=True)]
    mixed = [check("a", newest + 1, since=newest, at_fault=True)]
    ledger.agreement.hear(old)
    assert not await named(ledger)
    ledger.agreement.hear(mixed)
    assert "a (since version" in await named(ledger)
    assert not ledger.agreement.take_fault("a")
    ledger.agreement.hear([check("a", newest + 3, since=newest + 1, at_fault=True)])
    assert ledger.agreement.take_fault("a")
