"""Trainer and torch engine: weights are served exactly if the engine has them right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.plugins import WeightSnapshot
from paceline.weights.canary import Canary, CanaryRule, CanaryVerdict
from paceline.weights.snapshot.staging import Staging
from paceline_harness.models.corruptions import CORRUPTIONS, MODELS, corrupted, save_lively
from paceline_harness.models.published import staged
from paceline_rollout.engines.torch.model import TorchModel
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import shard
from paceline_trainer.weights.publish import Snapshotter

Judge = Callable[[WeightSnapshot], CanaryVerdict]


def published(folder: Path, group: RankGroup, dtype: str = "bfloat16") -> Staging:
    policy = load_policy(str(folder))
    shard(policy, group, dtype=dtype)
    snapshotter = Snapshotter(policy, group, engine_dtype=dtype, dtype=dtype)
    copy = snapshotter.begin(0)
    snapshotter.gather(copy)
    return staged(copy)


def judge(folder: Path, canary: Canary, dtype: str = "bfloat16") -> Judge:
    """What the real torch engine makes of a snapshot."""
    engine = TorchModel(model_dir=folder, dtype=dtype, max_context=128, device="cpu")

    def verdict(snapshot: WeightSnapshot) -> CanaryVerdict:
        engine.exchange(engine.prepare(snapshot))
        return CanaryRule().verdict(canary, [engine.score(s.tokens) for s in canary.sequences])

    return verdict


@pytest.mark.parametrize("family", MODELS)
def test_every_structural_fault_is_refused_and_right_weights_are_not(
    family: str, tmp_path: Path, group: RankGroup
) -> None:
    folder = save_lively(family, tmp_path)
    staging = published(folder, group)
    verdict = judge(folder, staging.header.canary)
    assert verdict(staging).ratio < 1.5
    kinds: set[str] = set()
    for kind in CORRUPTIONS:
        for seed in range(2):
            if (wrong := corrupted(staging, kind, seed)) is not None:
                found = verdict(wrong)
                assert not found.accepted, f"{kind}, seed {seed}: {found}"
                kinds.add(kind)
    assert len(kinds) >= len(CORRUPTIONS) - 2
    assert verdict(staging).accepted


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_in_float32_the_floor_decides(family: str, tmp_path: Path, group: RankGroup) -> None:
    folder = save_lively(family, tmp_path)
    staging = published(folder, group, "float32")
    verdict = judge(folder, staging.header.canary, "float32")
    assert verdict(staging).accepted
    for kind in CORRUPTIONS:
        wrong = corrupted(staging, kind, 0)
        assert wrong is None or not verdict(wrong).accepted, kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_that_no_log_prob_shows_is_found_by_the_bytes(
    dtype: str, tmp_path: Path, group: RankGroup
) -> None:
    folder = save_lively("llama_tied", tmp_path)
    staging = published(folder, group, dtype)
    engine = TorchModel(model_dir=folder, dtype=dtype, max_context=128, device="cpu")
    engine.exchange(engine.prepare(staging))
    assert engine.unequal(staging) == []
    for seed in range(4):
        wrong = corrupted(staging, "one weight", seed)
        assert wrong is not None
        engine.exchange(engine.prepare(wrong))
        differing = [
            entry.name
            for (entry, right), (_, read) in zip(staging.tensors(), wrong.tensors(), strict=True)
            if bytes(right) != bytes(read)
        ]
        assert len(differing) == 1
        assert engine.unequal(staging) == differing


def test_log_probs_are_noise_around_those_of_float32(tmp_path: Path, group: RankGroup) -> None:
    """An engine with half as much noise again as the trainer is right; one of 2.5 times is not."""
    folder = save_lively("llama", tmp_path)
    canary = published(folder, group).header.canary
    chance = torch.Generator().manual_seed(0)

    def noisy(times: float) -> Any:
        return [
            [
                x + canary.noise * times * float(torch.randn((), generator=chance))
                for x in s.logprobs
            ]
            for s in canary.sequences
        ]

    assert all(CanaryRule().verdict(canary, noisy(1.5)).accepted for _ in range(200))
    assert not any(CanaryRule().verdict(canary, noisy(2.5)).accepted for _ in range(200))
