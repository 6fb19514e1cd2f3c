"""LoRA: only adapters are trained, published, kept and stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.config.job import OptimizerSpec
from paceline.config.objective import ObjectiveSpec
from paceline.config.sections.lora import LoraSpec
from paceline.errors import ConfigError
from paceline.methods.objective.load import load_objective
from paceline.weights.adapters import MergedSnapshot
from paceline.weights.canary import CanaryRule
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.format import file_of
from paceline_trainer.columns import Share, columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_policy, open_policy
from paceline_trainer.step.lora import is_adapter
from paceline_trainer.step.model import DTYPES, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import local
from paceline_trainer.weights.publish import Snapshotter, WeightCopy

SPEC = LoraSpec(rank=4, alpha=8)


class Parts:
    """A policy with adapters, its optimiser and a learner whose loss has a KL to the reference."""

    def __init__(self, path: Path, group: RankGroup, *, dtype: str = "float32") -> None:
        torch.manual_seed(0)
        self.group = group
        self.policy = open_policy(str(path), lora=SPEC)
        shard(self.policy, group, dtype=dtype)
        self.optimizer = Optimizer(self.policy, OptimizerSpec(lr=1e-2), total_steps=40)
        objective = ObjectiveSpec.model_validate({"regularisers": [{"kind": "kl", "coef": 0.1}]})
        self.learner = Learner(
            policy=self.policy,
            optimizer=self.optimizer,
            objective=load_objective(objective),
            group=group,
            budget=200,
            reference=self.policy,
        )

    def step(self, samples: list[Any], step: int) -> dict[str, float]:
        data = columns(samples)
        return self.learner.step(
            Share("b", step, data.num_sequences, data.num_tokens, tuple(samples))
        )

    def named(self) -> dict[str, Tensor]:
        state = self.policy.inner.state_dict()
        return {n: local(t.detach()).clone() for n, t in state.items()}

    def published(self, *, engine: str = "float32", merge: bool = False) -> WeightCopy:
        snapshotter = Snapshotter(
            self.policy, self.group, engine_dtype=engine, dtype="float32", merge=merge
        )
        snapshot = snapshotter.begin(4)
        snapshotter.gather(snapshot)
        return snapshot


def loaded(snapshot: Any) -> dict[str, Tensor]:
    return {
        entry.name: torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape).clone()
        for entry, data in snapshot.tensors()
    }


def test_training_changes_adapters_only(llama: Path, group: RankGroup, make_samples: Any) -> None:
    parts = Parts(llama, group)
    before = parts.named()
    parts.step(make_samples(8), 0)
    after = parts.named()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".lora_B." in name}  # A has no gradient yet
    parts.step(make_samples(8, seed=1), 1)
    moved = {name for name, value in parts.named().items() if not torch.equal(before[name], value)}
    assert moved == {name for name in before if is_adapter(name)}


def test_the_reference_is_the_policy_without_adapters(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    parts, base = Parts(llama, group), load_policy(str(llama))
    first = parts.step(make_samples(8), 0)
    assert first["kl_reference"] == 0.0
    second = parts.step(make_samples(8), 1)
    assert second["kl_reference"] > 0.0
    inputs = (torch.arange(8)[None], None, torch.arange(7), torch.arange(1, 8), 1.0)
    with torch.no_grad(), parts.policy.without_adapters():
        found = parts.policy(*inputs).logprobs
    assert torch.equal(found, base(*inputs).logprobs)
    assert not torch.equal(found, parts.policy(*inputs).logprobs)


@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
def test_engines_compute_what_the_trainer_computes(
    llama: Path, group: RankGroup, make_samples: Any, stage: Any, scores_of: Any, engine: str
) -> None:
    parts = Parts(llama, group)
    first = stage(parts.published(engine=engine))
    for step in range(3):
        parts.step(make_samples(8, seed=step), step)
    copy = parts.published(engine=engine)
    snapshot = stage(copy)
    assert snapshot.root != first.root  # digests of version and version differ
    adapter, base = loaded(MergedSnapshot(snapshot)), loaded(MergedSnapshot(first))
    merged = stage(parts.published(engine=engine, merge=True))
    assert not merged.header.has_adapters
    # Both ways of publication give engines the same bits, and others than before training.
    for name, value in loaded(merged).items():
        assert torch.equal(value, adapter[name]), name
        assert torch.equal(value, base[name]) == (not name.endswith("_proj.weight")), name
    model: Any = AutoModelForCausalLM.from_pretrained(llama, dtype=DTYPES[engine])
    model.load_state_dict(adapter, strict=False)
    assert CanaryRule().verdict(copy.canary, scores_of(model, copy.canary)).ratio < 1.5


def test_only_adapters_differ_between_versions(
    llama: Path, group: RankGroup, make_samples: Any, stage: Any
) -> None:
    parts = Parts(llama, group)
    snapshotter = Snapshotter(parts.policy, group, engine_dtype="float32", dtype="float32")
    versions: list[dict[str, Tensor]] = []
    for step in range(2):
        copy = snapshotter.begin(step)
        snapshotter.gather(copy)
        versions.append(loaded(stage(copy)))
        later = {entry.name for entry in copy.entries if entry.offset >= copy.frozen_bytes}
        assert later == {entry.name for entry in copy.entries if ".lora_" in entry.name}
        parts.step(make_samples(8, seed=step), step)
    first, second = versions
    differing = {name for name in first if not torch.equal(first[name], second[name])}
    assert differing
    assert all(name.endswith(".lora_B.weight") for name in differing)


@pytest.mark.slow
def test_resumed_training_equals_uninterrupted_training(
    llama: Path, group: RankGroup, make_samples: Any, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, group=group, keep=2)
    first = Parts(llama, group)
    for step in range(10):
        first.step(make_samples(8, seed=step), step)
    checkpoints.save(10, first.policy, first.optimizer)
    stored = load_file(Path(checkpoints.path(10)) / file_of(0))
    assert {name for name in stored if name.startswith("model.")} == {
        f"model.inner.{name}" for name in first.named() if is_adapter(name)
    }
    second = Parts(llama, group)
    checkpoints.load(10, second.policy, second.optimizer)
    for step in range(10, 30):
        for parts in (first, second):
            parts.step(make_samples(8, seed=step), step)
    for name, value in first.named().items():
        assert torch.allclose(value, second.named()[name], atol=1e-6, rtol=0.0), name


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("absent",), r"trainer.lora.target_modules: .*absent"),
        (("embed_tokens",), r"trainer.lora.target_modules: model.embed_tokens cannot"),
        (("lm_head",), r"trainer.lora.target_modules: lm_head cannot"),
    ],
)
def test_modules_that_cannot_have_an_adapter_are_refused(
    llama: Path, targets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_policy(str(llama), lora=LoraSpec(target_modules=targets))
