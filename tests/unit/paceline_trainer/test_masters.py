"""A single rank in bfloat16: what computes is rounded, what is trained is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.config.job import OptimizerSpec
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.columns import columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step import model
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.masters import MasterWeights
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.scorer import TokenScorer
from paceline_trainer.step.versions import local


class Tied(nn.Module):
    """One parameter in two places, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=True)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        nn.init.ones_(self.first.weight)


def masters_of(policy: PolicyModel) -> dict[str, Tensor]:
    with policy.in_float32():
        return {name: each.detach().clone() for name, each in policy.named_parameters()}


def step(optimizer: Optimizer, number: int) -> None:
    """A step with gradients of 1: AdamW moves each weight by the learning rate."""
    for parameters in optimizer.inner.param_groups:
        for each in parameters["params"]:
            each.grad = torch.ones_like(each)
    optimizer.update(number)


def test_gradients_are_added_up_in_float32() -> None:
    """In bfloat16 a gradient of 2 ** -9 is lost beside one of 1."""
    module, masters = Tied(), MasterWeights(torch.bfloat16)
    master = module.first.weight
    masters.adopt(module)
    assert module.first.weight is module.second.weight is not master
    assert [each.dtype for each in module.parameters()] == [torch.bfloat16] * 2
    for gradient in (1.0, 2.0**-9, 2.0**-9):
        (module.first.weight * gradient).sum().backward()
    assert master.grad is not None
    assert master.grad.item() == 1.0 + 2.0**-8
    assert module.first.weight.grad is None
    with masters.restored():
        assert module.first.weight is module.second.weight is master
    assert module.first.weight is module.second.weight is not master


def test_small_updates_add_up(llama: Path, group: RankGroup, make_samples: Any) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="bfloat16")
    optimizer = Optimizer(policy, OptimizerSpec(lr=1e-5), total_steps=100)
    before, names = masters_of(policy), dict(policy.named_parameters())
    for number in range(3):
        step(optimizer, number)
    after = masters_of(policy)
    assert {each.dtype for each in after.values()} == {torch.float32}
    moved = {n: (before[n] - after[n]).mean().item() for n in names}
    assert all(value == pytest.approx(3e-5, rel=0.05) for value in moved.values())
    assert all(torch.equal(own, after[name].bfloat16()) for name, own in names.items())


def test_gradients_are_those_of_mixed_precision_in_fsdp(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    data = columns(make_samples(12))
    found: list[dict[str, Tensor]] = []
    for cut in (shard, model._shard):  # pyright: ignore[reportPrivateUsage]
        policy = load_policy(str(llama))
        cut(policy, group, dtype="bfloat16")
        scorer = TokenScorer(policy=policy, group=group, budget=60)
        (part,) = scorer.parts(data, [torch.arange(data.num_sequences).numpy()])
        assert part.num_micro_batches > 1
        for index in range(part.num_micro_batches):
            scorer.forward(scorer.micro_batch(data, part, index)).logprobs.sum().backward()
        model.reshard(policy)
        with policy.in_float32():
            named = policy.named_parameters()
            found.append({n: local(p.grad) for n, p in named if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.allclose(found[0][name], found[1][name], rtol=1e-3) for name in found[0])


def test_a_checkpoint_has_the_float32_weights(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, group=group, keep=1)
    policies = {dtype: load_policy(str(llama)) for dtype in ("bfloat16", "float32")}
    optimizers: dict[str, Optimizer] = {}
    for dtype, policy in policies.items():
        shard(policy, group, dtype=dtype)
        optimizers[dtype] = Optimizer(policy, OptimizerSpec(lr=1e-5), total_steps=10)
    step(optimizers["bfloat16"], 0)
    checkpoints.save(1, policies["bfloat16"], optimizers["bfloat16"])
    saved = masters_of(policies["bfloat16"])
    again = load_policy(str(llama))
    shard(again, group, dtype="bfloat16")
    optimizers["again"] = Optimizer(again, OptimizerSpec(), total_steps=10)
    for name, policy in {"float32": policies["float32"], "again": again}.items():
        checkpoints.load(1, policy, optimizers[name])
        assert all(torch.equal(saved[n], each) for n, each in masters_of(policy).items())
    assert all(torch.equal(own, saved[n].bfloat16()) for n, own in again.named_parameters())


def test_copies_are_borrowed_until_the_weights_change(llama: Path, group: RankGroup) -> None:
    """What was served is read where it is, and never written to."""
    policies: list[PolicyModel] = []
    for borrows in (False, True):
        policy = load_policy(str(llama))
        shard(policy, group, dtype="bfloat16")
        optimizer = Optimizer(policy, OptimizerSpec(lr=0.1), total_steps=9)
        served = [each.detach().clone() for each in policy.trained()]
        kept = [each.clone() for each in served]
        for number in range(3):
            if borrows and number != 1:
                served = [each.detach().clone() for each in policy.trained()]
                kept = [each.clone() for each in served]
                assert policy.share(served)
                pairs = zip(policy.trained(), served, strict=True)
                assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)
            step(optimizer, number)
            assert all(map(torch.equal, served, kept))
        assert not policy.share([each.float() for each in policy.trained()])
        policies.append(policy)
    alone, borrowed = (policy.trained() for policy in policies)
    assert all(map(torch.equal, alone, borrowed))
    assert all(map(torch.equal, masters_of(policies[0]).values(), masters_of(policies[1]).values()))


def test_weights_without_copies_are_not_shared(llama: Path, group: RankGroup) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    assert not policy.share([each.detach().clone() for each in policy.trained()])
