"""Whose regular expressions are checked when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline_gateway.submit.patterns import Patterns

SLOW = [r"[\u4e00-\u9fff]"]


async def test_a_tenant_does_not_take_all_places() -> None:
    busy, go_on = 0, asyncio.Event()

    async def compile_in_child(given: Sequence[str]) -> list[str]:
        nonlocal busy
        busy += 1
        await go_on.wait()
        return [""]

    checks = Patterns(compile_in_child)
    asked = [asyncio.create_task(checks.problems(SLOW, "a")) for _ in range(8)]
    asked += [asyncio.create_task(checks.problems(SLOW, tenant)) for tenant in ("b", "c")]
    for _ in range(10):
        await asyncio.sleep(0)
    assert busy == 3  # one of each
    go_on.set()
    assert await asyncio.gather(*asked) == [[""]] * 10
    assert busy == 10
