"""Time limits in a process that may be suspended."""

from __future__ import annotations

import asyncio
import time

import pytest

from paceline.weights.transfer.countdown import Countdown, running_timeout


async def test_a_limit_that_is_reached() -> None:
    with pytest.raises(TimeoutError):
        async with running_timeout(0.2):
            await asyncio.Event().wait()


async def test_a_freeze_is_one_tick() -> None:
    async with running_timeout(0.5):
        time.sleep(1.0)
        await asyncio.sleep(0.05)


async def test_a_countdown_fires_once_unless_cancelled() -> None:
    called: list[int] = []
    countdowns = [Countdown(0.2, lambda i=i: called.append(i)) for i in range(2)]
    countdowns[0].cancel()
    while not called:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert called == [1]
