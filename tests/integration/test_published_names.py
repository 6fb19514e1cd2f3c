"""What the trainer publishes is a checkpoint, and the torch engine computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline.config.sections.lora import LoraSpec
from paceline.errors import InvalidError
from paceline.plugins import WeightSnapshot
from paceline.testing.engines import snapshot as snapshot_of
from paceline.weights import Staging
from paceline.weights.adapters import MergedSnapshot
from paceline.weights.canary import Canary
from paceline_harness.models.families import CONVERTED, save_family
from paceline_harness.models.published import staged
from paceline_rollout.engines.sglang.layout import Layout
from paceline_rollout.engines.torch.model import TorchModel
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import load_policy, open_policy
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.weights.publish import Snapshotter

FAMILIES = (*CONVERTED, "llama_tied")
TOLERANCE = 1e-4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def published(snapshotter: Snapshotter, step: int = 4) -> Staging:
    copy = snapshotter.begin(step)
    snapshotter.gather(copy)
    return staged(copy)


def tensors_of(snapshot: WeightSnapshot) -> dict[str, torch.Tensor]:
    return {
        entry.name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(entry.shape)
        for entry, data in snapshot.tensors()
    }


def check_engine(
    folder: Path, policy: PolicyModel, snapshot: WeightSnapshot, canary: Canary
) -> None:
    """The torch engine, with these weights, has the log-probs of the trainer."""
    engine = TorchModel(model_dir=folder, max_context=64, device="cpu", dtype="float32")
    engine.exchange(engine.prepare(snapshot))
    ids = torch.arange(24)[None] % engine.vocab_size
    with torch.no_grad():
        expected = policy(ids, None, torch.arange(23), ids[0, 1:], 1.0).logprobs.tolist()
    assert engine.score(ids[0].tolist()) == pytest.approx(expected, abs=TOLERANCE)
    for each in canary.sequences:
        assert engine.score(list(each.tokens)) == pytest.approx(each.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_computes_with_what_a_trainer_publishes(
    family: str, tmp_path: Path, group: RankGroup
) -> None:
    folder = save_family(family, tmp_path)
    policy = load_policy(str(folder))
    shard(policy, group, dtype="float32")
    staging = published(Snapshotter(policy, group, engine_dtype="float32", dtype="float32"))
    saved, sent = load_file(folder / "model.safetensors"), tensors_of(staging)
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], value) for name, value in saved.items())
    Layout(folder).check(staging)
    check_engine(folder, policy, staging, staging.header.canary)


@pytest.mark.parametrize("merge", [False, True])
def test_a_model_with_experts_and_adapters(tmp_path: Path, group: RankGroup, merge: bool) -> None:
    folder = save_family("qwen3_moe", tmp_path)
    policy = open_policy(str(folder), lora=LoraSpec(rank=2, alpha=4, target_modules=TARGETS))
    shard(policy, group, dtype="float32")
    snapshotter = Snapshotter(policy, group, engine_dtype="float32", dtype="float32", merge=merge)
    saved = load_file(folder / "model.safetensors")
    for step in range(2):  # experts are converted for the first version only
        with torch.no_grad():
            for parameter in policy.trained():
                parameter.add_(0.1)
        staging = published(snapshotter, step)
        snapshot = MergedSnapshot(staging) if staging.header.has_adapters else staging
        assert staging.header.has_adapters != merge
        Layout(folder).check(snapshot)
        check_engine(folder, policy, snapshot, staging.header.canary)
        loaded = tensors_of(snapshot)
        changed = {name for name in saved if not torch.equal(loaded[name], saved[name])}
        assert changed == {name for name in saved if ".self_attn." in name and "_proj." in name}


def test_what_has_the_names_of_memory_does_not_reach_sglang(tmp_path: Path) -> None:
    """SGLang would load none of the experts, and say nothing."""
    folder = save_family("qwen3_moe", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(InvalidError, match=r"experts.*' is unknown to this model \(and 3 more\)"):
        Layout(folder).check(snapshot_of(model, 0))


def test_a_snapshot_of_the_previous_release_is_loaded(tmp_path: Path) -> None:
    folder = save_family("qwen3_moe", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = TorchModel(model_dir=folder, max_context=64, device="cpu", dtype="float32")
    engine.exchange(engine.prepare(snapshot_of(model, 0)))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = torch.log_softmax(model(ids).logits[0, :-1], -1)
    expected = logits.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    assert engine.score(ids[0].tolist()) == pytest.approx(expected, abs=TOLERANCE)
