"""Tests each plug-in of this distribution against the contract of its kind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from paceline.config import load_job
from paceline.plugins import Engine, Guest, Stored, TrackedRun
from paceline.testing import (
    advantages,
    allocators,
    engine_contract,
    environments,
    filters,
    replays,
    rewards,
    samplers,
    slots,
    topologies,
    trackers,
    transforms,
)
from paceline_example.engine import Metered


def test_environment() -> None:
    environments.fulfils_the_contract(
        "copying",
        {"digits": 3},
        answer=lambda task: json.loads(task.payload)["answer"],
        reward=1.0,
    )


def test_topology() -> None:
    assert topologies.fulfils_the_contract("stripped").actions == ["word"] * 5


def test_transform() -> None:
    found = transforms.fulfils_the_contract("addressed", {"names": ["Ada", "Alan", "Grace"]})
    assert {each.name for each in found} == {"Ada", "Alan", "Grace"}


def test_reward() -> None:
    items = [rewards.item(text, answer="42") for text in ("42 ", "4", "24")]
    rewards.fulfils_the_contract("beginning", items=items, rewards=[1.0, 0.25, 0.0])


def test_filter() -> None:
    cut_off = filters.finished_group([0.0, 0.0], truncated=[True, True])
    partly = filters.finished_group([0.0, 1.0, 0.0], truncated=[False, True, False])
    filters.fulfils_the_contract(
        "solved", keeps=[(0.0, 1.0)], drops=[(1.0, 1.0), cut_off], picks=[(partly, (0, 2))]
    )


def test_allocator() -> None:
    def solved(task: int, index: int) -> float:
        return 1.0

    def failed(task: int, index: int) -> float:
        return 0.0

    sizes = [(solved, 2), (failed, 4)]
    allocators.fulfils_the_contract("second_try", group_size=4, sizes=sizes)


def test_replay() -> None:
    pool = [Stored(1.0, 3), Stored(1.0, 7), Stored(0.5, 9)]
    replays.fulfils_the_contract(
        "best",
        keeps=[((0.5, 1.0, 1.0), (1,))],
        offers=[((0.0, 0.5), pool, [Guest(1)]), ((0.0, 1.0), pool, [])],
    )


def test_sampler() -> None:
    samplers.fulfils_the_contract("in_order")


def test_advantage() -> None:
    advantages.fulfils_the_contract("batch_mean", {"limit": 2.0})
    advantages.fulfils_the_contract("rarity")


def test_correction() -> None:
    slots.fulfils_the_contract("corrections", "near", {"width": 0.1})


def test_recipe() -> None:
    spec = load_job(Path(__file__).parents[1] / "recipe.yaml")
    assert [each.kind for each in spec.trainer.objective.corrections] == ["near"]
    assert spec.experience.advantage_shaping[0].options == {"power": 0.5}


def test_surrogate() -> None:
    slots.fulfils_the_contract("surrogates", "capped", {"cap": 1.5})


async def engine() -> None:
    def make() -> Engine:
        shape: dict[str, Any] = {"dtype": "float32", "threads": 1, "job_id": "job"}
        return Metered(
            inner="simulated",
            model_dir=None,
            tokenizer_dir=None,
            max_context=256,
            max_concurrent=16,
            vocab_size=32,
            decode_tokens_per_s=400.0,
            length={"mean": 10_000.0},
            tick_s=0.002,
            flush_s=0.01,
            **shape,
        )

    await engine_contract.fulfils_the_contract(make)


def test_engine() -> None:
    asyncio.run(engine())


def test_tracker(tmp_path: Path) -> None:
    def rows(run: TrackedRun) -> list[int]:
        lines = (run.folder / "values.csv").read_text().splitlines()
        found = [int(line.split(",")[0]) for line in lines if "train/loss" in line]
        return [row for row in found if row >= 0]

    trackers.fulfils_the_contract("csv", tmp_path, read=rows)
