"""The cap on sealed processes of all jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from paceline.isolation.cap import ProcessCap, Release
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.telemetry.metrics import Metrics
from paceline_harness.patience import PATIENCE_S

A, B = QueueOwner("t", "a"), QueueOwner("t", "b")


async def test_the_job_with_the_fewest_is_next() -> None:
    metrics = Metrics()
    cap = ProcessCap(3, on_waiting=partial(metrics.set, "code_processes_waiting"))
    held = [await cap.take(A) for _ in range(3)]
    asked = [asyncio.create_task(cap.take(owner)) for owner in (A, A, B)]
    await asyncio.sleep(0)
    assert cap.full
    assert cap.wanted
    assert metrics.registry.get_sample_value("paceline_code_processes_waiting") == 3
    held[0]()
    held[0]()  # once is enough
    await asyncio.sleep(0.01)
    assert [each.done() for each in asked] == [False, False, True]
    for each in asked:
        each.cancel()
    await asyncio.wait(asked)
    assert not cap.wanted
    assert metrics.registry.get_sample_value("paceline_code_processes_waiting") == 0


async def test_room_is_made_only_when_it_is_needed() -> None:
    ended: list[QueueOwner] = []
    held: list[Release] = []

    async def make_room(owner: QueueOwner) -> None:
        ended.append(owner)
        held.pop()()

    cap = ProcessCap(2, make_room=make_room)
    for _ in range(2):
        held.append(await cap.take(A))
    assert ended == []
    async with asyncio.timeout(PATIENCE_S):
        await cap.take(B)
    assert ended == [B]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "end", "cancel"]))))
def test_no_place_is_lost_or_given_twice(steps: list[tuple[str, str]]) -> None:
    asyncio.run(_played(steps))


async def _played(steps: list[tuple[str, str]]) -> None:
    cap = ProcessCap(2)
    waiting: list[tuple[str, asyncio.Task[Release]]] = []
    held: list[tuple[str, Release]] = []
    for job, step in steps:
        if step == "take":
            waiting.append((job, asyncio.create_task(cap.take(QueueOwner("t", job)))))
        elif step == "end" and (found := next((each for each in held if each[0] == job), None)):
            held.remove(found)
            found[1]()
        elif step == "cancel" and (late := next((w for w in waiting if w[0] == job), None)):
            waiting.remove(late)
            late[1].cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        for each in [w for w in waiting if w[1].done()]:
            waiting.remove(each)
            held.append((each[0], each[1].result()))
        assert len(held) == min(2, len(held) + len(waiting)), Counter(job for job, _ in held)
    for _, task in waiting:
        task.cancel()
    await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
