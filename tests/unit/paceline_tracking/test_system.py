"""What is kept of the workers of a job while its tracker is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from paceline.enums import WorkerKind
from paceline.errors import UnavailableError
from paceline.platform.progress import LedgerProgress
from paceline.types import Worker
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import FakeClock
from paceline_tracking.history import HistoryReader
from paceline_tracking.system import MOST, System


class Looks:
    """The part of a ledger that is asked for system points."""

    def __init__(self) -> None:
        self.away = self.over = False
        self.asked = 0

    async def live(self, job_id: str) -> LedgerProgress | None:
        self.asked += 1
        if self.away:
            raise UnavailableError("away")
        if self.over:
            return None
        return LedgerProgress(step=self.asked, version=3, tokens_generated=100 * self.asked)

    async def workers(self, job_id: str) -> Sequence[Worker]:
        return [Worker("a", WorkerKind.ROLLOUT, "", load={"running": 2.0})]


def watching(looks: Looks, clock: FakeClock) -> System:
    return System(ledger=cast(HistoryReader, looks), job_id="j", period_s=0.001, clock=clock)


async def test_points_cover_ledger_and_workers_once() -> None:
    clock = FakeClock()
    system = watching(Looks(), clock)
    await system.look()
    clock.pass_s(4.0)
    await system.look()
    first, second = system.take()
    assert (first.kind, first.index, first.step, first.version) == ("system", -1, 1, 3)
    assert first.values["system/rollout/workers"] == 1.0
    assert first.values["system/rollout/running"] == 2.0
    assert "system/tokens_per_s" not in first.values
    assert second.step == 2
    assert second.values["system/tokens_per_s"] == 25.0
    assert system.take() == []


async def test_a_job_that_is_over_has_none() -> None:
    looks = Looks()
    looks.over = True
    system = watching(looks, FakeClock())
    await system.look()
    assert system.take() == []


async def test_the_newest_are_kept() -> None:
    system = watching(Looks(), FakeClock())
    for _ in range(MOST + 5):
        await system.look()
    assert [point.step for point in system.take()] == list(range(6, MOST + 6))


async def test_an_unreachable_ledger_stops_nothing() -> None:
    looks = Looks()
    looks.away = True
    system = watching(looks, FakeClock())
    task = asyncio.create_task(system.run())
    async with asyncio.timeout(PATIENCE_S):
        while looks.asked < 3:
            await asyncio.sleep(0.001)
        looks.away = False
        while not (taken := system.take()):
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert taken[0].step >= 4
