import asyncio
import threading
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.platform.fair_queue import FairQueue, FairThreads, QueueOwner
from paceline_harness.patience import PATIENCE_S

OWNERS = [
    QueueOwner("a", "a1"),
    QueueOwner("a", "a2"),
    QueueOwner("a", "a3"),
    QueueOwner("b", "b1"),
]


async def scored(queue: FairQueue, owner: QueueOwner, order: list[QueueOwner]) -> None:
    async with queue.slot(owner):
        order.append(owner)
        await asyncio.sleep(0)


async def test_a_long_queue_of_one_tenant_does_not_keep_another_waiting() -> None:
    queue, order = FairQueue(1), list[QueueOwner]()
    long = [asyncio.create_task(scored(queue, OWNERS[i % 3], order)) for i in range(60)]
    await asyncio.sleep(0)
    short = [asyncio.create_task(scored(queue, OWNERS[3], order)) for _ in range(5)]
    await asyncio.gather(*long, *short)
    last = max(index for index, owner in enumerate(order) if owner.tenant == "b")
    assert last <= 2 * 5 + 1
    assert Counter(order) == {OWNERS[0]: 20, OWNERS[1]: 20, OWNERS[2]: 20, OWNERS[3]: 5}


async def test_jobs_of_a_tenant_take_turns() -> None:
    queue, order = FairQueue(1), list[QueueOwner]()
    many = [asyncio.create_task(scored(queue, OWNERS[0], order)) for _ in range(30)]
    await asyncio.sleep(0)
    few = [asyncio.create_task(scored(queue, OWNERS[1], order)) for _ in range(3)]
    await asyncio.gather(*many, *few)
    assert max(index for index, owner in enumerate(order) if owner == OWNERS[1]) <= 7


async def test_a_tenant_holds_no_more_than_its_most_so_that_another_need_not_wait() -> None:
    queue = FairQueue(3, most_of_tenant=2)
    long = [asyncio.create_task(queue.acquire(OWNERS[0])) for _ in range(5)]
    await asyncio.sleep(0)
    assert sum(each.done() for each in long) == 2
    async with asyncio.timeout(PATIENCE_S):
        await queue.acquire(OWNERS[3])
    queue.release(OWNERS[3])
    queue.release(OWNERS[0])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(each.done() for each in long) == 3
    for each in long:
        each.cancel()
    await asyncio.gather(*long, return_exceptions=True)


@settings(deadline=None)
@given(
    slots=st.integers(1, 3),
    acts=st.lists(
        st.tuples(st.sampled_from(OWNERS), st.integers(0, 3), st.booleans()), max_size=25
    ),
)
def test_places_are_never_lost_or_given_twice(
    slots: int, acts: list[tuple[QueueOwner, int, bool]]
) -> None:
    """Also when those who wait, or have just been given a place, are cancelled."""

    async def play() -> None:
        queue, inside = FairQueue(slots), 0

        async def hold(owner: QueueOwner, rounds: int) -> None:
            nonlocal inside
            async with queue.slot(owner):
                inside += 1
                assert inside <= slots
                try:
                    for _ in range(rounds):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks: list[asyncio.Task[None]] = []
        for owner, rounds, cancel in acts:
            tasks.append(asyncio.create_task(hold(owner, rounds)))
            if rounds % 2:
                await asyncio.sleep(0)
            if cancel:
                tasks[len(tasks) // 2].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(hold(OWNERS[0], 1) for _ in range(slots * 3)))

    asyncio.run(play())


async def test_calls_that_nobody_waits_for_keep_their_threads_and_others_have_theirs() -> None:
    threads, hanging, entered = FairThreads(3, "test", most_of_tenant=2), threading.Event(), 0

    def hang() -> None:
        nonlocal entered
        entered += 1
        hanging.wait()

    given_up = [asyncio.create_task(threads.run(QueueOwner("a"), hang)) for _ in range(8)]
    while entered < 2:
        await asyncio.sleep(0.001)
    for each in given_up[:4]:
        each.cancel()
    async with asyncio.timeout(PATIENCE_S):
        assert await threads.run(QueueOwner("b"), lambda: 7) == 7
    assert entered == 2
    hanging.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*given_up[4:])
