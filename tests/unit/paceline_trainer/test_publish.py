from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.weights import Header, Staging, plan
from paceline_trainer.distributed import Group
from paceline_trainer.model import DTYPES, load_policy, shard
from paceline_trainer.publish import Copier, Snapshot, fill


def copy(path: Path, group: Group, *, engine: str, dtype: str = "float32") -> Snapshot:
    policy = load_policy(str(path))
    shard(policy, group, dtype=dtype)
    return Copier(policy, group, engine_dtype=engine, dtype=dtype).copy(4)


def stage(snapshot: Snapshot) -> Staging:
    described = [(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in snapshot.tensors.items()]
    entries, num_bytes = plan(described)
    staging = Staging(Header("j", 7, 4, 6, -1, 1, num_bytes, 4096, entries, snapshot.tied))
    fill(staging, snapshot.tensors)
    return staging


def receive(path: Path, staging: Staging) -> Any:
    """A model built as an engine does: from the shapes, then the staged bytes."""
    dtype = DTYPES[staging.header.tensors[0].dtype]
    own: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    state = own.state_dict()
    for entry, data in staging.tensors():
        state[entry.name] = torch.frombuffer(data, dtype=dtype).view(entry.shape).clone()
    for name, same_as in staging.header.tied:
        state[name] = state[same_as]
    own.load_state_dict(state)
    return own


@pytest.mark.parametrize(("engine", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_staged_tensors_are_the_weights(llama: Path, group: Group, engine: str, dtype: str) -> None:
    staging = stage(copy(llama, group, engine=engine, dtype=dtype))
    expected = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    assert staging.complete
    for entry, data in staging.tensors():
        found = torch.frombuffer(data, dtype=DTYPES[engine]).view(entry.shape)
        assert torch.equal(found, expected[entry.name].to(DTYPES[engine])), entry.name
    assert staging.header.tied == (("lm_head.weight", "model.embed_tokens.weight"),)


@pytest.mark.parametrize(
    ("engine", "dtype", "tolerance"),
    [
        ("float32", "float32", 1e-5),
        ("bfloat16", "float32", 1e-5),
        ("float32", "bfloat16", 1e-5),
        ("bfloat16", "bfloat16", 0.05),
    ],
)
def test_canary_is_what_the_engine_computes(
    llama: Path, group: Group, engine: str, dtype: str, tolerance: float
) -> None:
    snapshot = copy(llama, group, engine=engine, dtype=dtype)
    model = receive(llama, stage(snapshot))
    tokens = torch.tensor(snapshot.canary_tokens)
    with torch.no_grad():
        logits = cast(torch.Tensor, model(tokens[None]).logits)[0, :-1].float()
    expected = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
    assert snapshot.canary_logprobs == pytest.approx(expected.tolist(), abs=tolerance)


def test_snapshot_does_not_follow_the_weights(llama: Path, group: Group) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    snapshot = Copier(policy, group, engine_dtype="float32", dtype="float32").copy(0)
    before = {name: value.clone() for name, value in snapshot.tensors.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in snapshot.tensors.items())
