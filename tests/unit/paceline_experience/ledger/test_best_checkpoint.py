"""The best checkpoint by eval stays beside the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

EVAL: dict[str, Any] = {"every": 1, "tasks": 2, "timeout_s": 50}


async def measured(world: World, ledger: JobLedger, reward: float) -> None:
    leased = await ledger.leases.lease(worker_id="w", train=0, evals=10)
    await ledger.submit([world.made(a, 0, reward=reward) for a in leased])
    await ledger.sweep()
    await ledger.record()


async def step(world: World, ledger: JobLedger, number: int, *, incarnation: int = 1) -> None:
    """Train and publish the step after `number`."""
    await world.filled(ledger, version=(await ledger.live()).version)
    await world.trained(ledger, number, incarnation=incarnation)


async def saved(ledger: JobLedger, number: int, *, incarnation: int = 1) -> tuple[int, ...]:
    kept = [each for each in (number - 1, number) if each >= 0]
    return await ledger.commit_checkpoint(
        incarnation=incarnation, step=number, path="p", kept=kept, digest=f"d{number}"
    )


def best(world: World) -> tuple[int, float | None] | None:
    found = [each for each in world.hooks.listed if each.best]
    assert len(found) <= 1
    return (found[0].step, found[0].value) if found else None


async def test_the_best_one_stays_and_survives_a_restart(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    await measured(world, ledger, 0.0)
    for number, reward in enumerate((0.25, 0.75, 0.5, 0.75), 1):
        await step(world, ledger, number - 1)
        stay = await saved(ledger, number)
        await measured(world, ledger, reward)
        # The best of those that are measured, and the one whose evaluation has just begun.
        assert stay == {1: (1,), 2: (1, 2), 3: (2, 3), 4: (2, 4)}[number]
    assert best(world) == (2, 0.75)  # the first of equal ones
    ledger = await world.opened()
    await ledger.record()
    assert best(world) == (2, 0.75)
    await step(world, ledger, 4)
    assert 2 in await saved(ledger, 5)
    assert [each.step for each in world.hooks.listed] == [2, 4, 5]
    assert [each.digest for each in world.hooks.listed] == ["d2", "d4", "d5"]
    # The ledger has no batches of steps before the oldest of the newest ones.
    assert await ledger.batches.checkpoints(incarnation=1) == {4: "d4", 5: "d5"}
    await ledger.completion.cancel()
    await ledger.sweep()
    assert [each.step for each in world.hooks.listed] == [2, 4, 5]  # to be exported or forked
    assert list(await ledger.batches.checkpoints(incarnation=1)) == [5]


async def test_one_under_evaluation_stays_until_it_is_measured(
    store: Store, worlds: Worlds
) -> None:
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    await measured(world, ledger, 0.0)
    await step(world, ledger, 0)
    await saved(ledger, 1)  # the eval of step 1 goes on
    for number in (2, 3, 4):
        await step(world, ledger, number - 1)
        assert await saved(ledger, number) == (1, number)
    await measured(world, ledger, 0.5)
    assert best(world) == (1, 0.5)


async def test_a_rewind_forgets_what_was_measured_after_it(store: Store, worlds: Worlds) -> None:
    world = worlds(store, eval=EVAL)
    ledger = await world.started()
    await measured(world, ledger, 0.0)
    for number, reward in enumerate((0.25, 0.5), 1):
        await step(world, ledger, number - 1)
        await saved(ledger, number)
        await measured(world, ledger, reward)
    await step(world, ledger, 2)  # its eval is open when the trainer starts again
    assert best(world) == (2, 0.5)
    incarnation = await ledger.grant_incarnation()
    await ledger.rewind(incarnation=incarnation, step=1)
    assert best(world) == (1, 0.25)
    await measured(world, ledger, 1.0)  # of weights that no checkpoint will have
    for number in (1, 2):
        await step(world, ledger, number, incarnation=incarnation)
        await saved(ledger, number + 1, incarnation=incarnation)
    assert best(world) == (1, 0.25)


@pytest.mark.parametrize(
    ("changes", "rewards", "expected"),
    [
        ({"direction": "min"}, (0.5, 0.25, 0.75), 2),
        ({"metric": "truncated_share", "direction": "min"}, (0.5, 0.25, 0.75), 1),
        (None, (0.5, 0.25, 0.75), None),
    ],
)
async def test_metric_and_direction(
    store: Store, worlds: Worlds, changes: Any, rewards: Any, expected: int | None
) -> None:
    checkpoint = {"every": 1, "best": changes}
    world = worlds(store, eval=EVAL, trainer={"checkpoint": checkpoint})
    ledger = await world.started()
    await measured(world, ledger, 0.0)
    for number, reward in enumerate(rewards, 1):
        await step(world, ledger, number - 1)
        await saved(ledger, number)
        await measured(world, ledger, reward)
    found = best(world)
    assert (found[0] if found else None) == expected
