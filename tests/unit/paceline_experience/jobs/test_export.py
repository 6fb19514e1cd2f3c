from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from paceline_experience.jobs.export import Exporter

if TYPE_CHECKING:
    from conftest import Worlds

    from paceline_experience.store.store import Store


async def test_concurrent_exports_write_each_episode_once(
    store: Store, worlds: Worlds, tmp_path: Path
) -> None:
    world = worlds(store)
    ledger = await world.started()
    for step in range(2):
        await world.filled(ledger, version=step)
        await world.trained(ledger, step)
    exporter = Exporter(tmp_path)
    counts = await asyncio.gather(*(exporter.export(ledger, name=name) for name in "ab"))
    assert sorted(counts) == [0, 8]
    [path] = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["group_id"] for line in lines] == [f"j1.{n}" for n in (0, 0, 1, 1, 2, 2, 3, 3)]
