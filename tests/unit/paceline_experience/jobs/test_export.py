from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline_experience.jobs.export import Exporter
from paceline_harness.servers.store_contents import contents, put_back

if TYPE_CHECKING:
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import Worlds


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


@pytest.mark.parametrize("first", [1, 2])  # step whose export is lost
@pytest.mark.parametrize("lost", ["its end", "all of it", "the step too"])
async def test_an_export_that_the_store_forgot_is_not_repeated(
    lost: str, first: int, store: Store, worlds: Worlds, tmp_path: Path
) -> None:
    world = worlds(store)
    ledger = await world.started()
    exporter = Exporter(tmp_path)
    states: dict[str, dict[bytes, bytes]] = {}
    for step in range(first + 1):
        states["the step too"] = await contents(store)
        await world.filled(ledger, version=step)
        await world.trained(ledger, step)
        states["all of it"] = await contents(store)
        if step:
            name = f"step-{step + 1:06d}"
            assert await ledger.trajectories.begin(name, before_step=step + 1)
            states["its end"] = await contents(store)
            await exporter.export(ledger, name=name, before_step=step + 1)
    await put_back(store, states[lost])
    await ledger.sweep()
    for step in range(first if lost == "the step too" else first + 1, 4):
        await world.filled(ledger, version=step)
        await world.trained(ledger, step)
    await exporter.export(ledger, name="step-000004", before_step=4)
    lines = [
        json.loads(line)
        for path in sorted(tmp_path.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    names = [(line["group_id"], line["index"]) for line in lines]
    assert len(names) == len(set(names)) == 4 * 4


async def test_exported_episodes_have_their_texts(
    store: Store, worlds: Worlds, tmp_path: Path
) -> None:
    world = worlds(store)
    ledger = await world.started()
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    several = {"completion_text": "2, or<tool>3</tool>3", "response_text": "3"}
    texts = [{"response_text": "3"}, several]
    said = world.whole(leased)
    await ledger.submit(
        [replace(each, prompt_text="1+2=", **texts[each.index % 2]) for each in said]
    )
    await world.trained(ledger, 0)
    assert await Exporter(tmp_path).export(ledger, name="final")
    lines = map(json.loads, (tmp_path / "final.jsonl").read_text().splitlines())
    written = {(each["prompt_text"], each["completion_text"]) for each in lines}
    assert written == {("1+2=", "3"), ("1+2=", "2, or<tool>3</tool>3")}
