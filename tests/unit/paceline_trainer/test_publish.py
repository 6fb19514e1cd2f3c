from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidError, UnavailableError
from paceline.weights.canary import CanaryRule
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.staging import Staging
from paceline_harness.patience import PATIENCE_S
from paceline_trainer.columns import columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.data import assemble
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import DTYPES, shard
from paceline_trainer.step.versions import local_shards, with_weights
from paceline_trainer.weights.publish import Snapshotter, WeightCopy, fill
from paceline_trainer.weights.tensor_queue import TensorQueue

VOCAB = 32  # of the tiny model


def copy(path: Path, group: RankGroup, *, engine: str, dtype: str = "float32") -> WeightCopy:
    policy = load_policy(str(path))
    shard(policy, group, dtype=dtype)
    snapshotter = Snapshotter(policy, group, engine_dtype=engine, dtype=dtype)
    snapshot = snapshotter.begin(4)
    snapshotter.gather(snapshot)
    return snapshot


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
def test_staged_tensors_are_the_weights(
    llama: Path, group: RankGroup, stage: Any, engine: str, dtype: str
) -> None:
    staging = stage(copy(llama, group, engine=engine, dtype=dtype))
    expected = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    assert staging.complete
    for entry, data in staging.tensors():
        found = torch.frombuffer(data, dtype=DTYPES[engine]).view(entry.shape)
        assert torch.equal(found, expected[entry.name].to(DTYPES[engine])), entry.name
    assert staging.header.tied == (("lm_head.weight", "model.embed_tokens.weight"),)


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_canary_is_what_the_engine_computes(
    llama: Path, group: RankGroup, stage: Any, scores_of: Any, engine: str, dtype: str
) -> None:
    """Exactly so in float32; else as far off as the noise of the precision says."""
    snapshot = copy(llama, group, engine=engine, dtype=dtype)
    model = receive(llama, stage(snapshot))
    for precision, largest in ((torch.float32, 0.05), (DTYPES[engine], 1.5)):
        scored = scores_of(model.to(precision), snapshot.canary)
        verdict = CanaryRule().verdict(snapshot.canary, scored)
        assert verdict.ratio < largest
    assert (snapshot.canary.noise > 1e-3) == (engine == "bfloat16")


def test_the_canary_is_text_of_the_policy_that_stays_the_same(
    llama: Path, group: RankGroup
) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    before = torch.random.get_rng_state()
    snapshotter = Snapshotter(policy, group, engine_dtype="float32", dtype="float32")
    first = snapshotter.begin(0).canary
    assert torch.equal(torch.random.get_rng_state(), before)  # others draw from it
    assert [len(each.tokens) for each in first.sequences] == [128] * 4
    own = [value for each in first.sequences for value in each.logprobs]
    # A policy finds its own text as probable as it has entropy; other text is much less so.
    assert sum(own) / len(own) > -float(np.log(VOCAB))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    second = snapshotter.begin(1).canary
    assert [each.tokens for each in second.sequences] == [each.tokens for each in first.sequences]
    assert second.sequences[0].logprobs != first.sequences[0].logprobs


@pytest.mark.slow
def test_a_canary_gathers_the_weights_once_for_its_text(
    llama: Path, run_ranks: Any, tmp_path: Path
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"path": str(llama)}))
    run_ranks(2, "canary", tmp_path)
    found, other = (json.loads((tmp_path / f"canary-{rank}.json").read_text()) for rank in range(2))
    assert found["first"] == found["second"] == other["first"] == other["second"]
    assert [len(tokens) for tokens in found["first"]] == [128] * 4
    assert found["gathered_second"] >= found["sharded"] > 0
    assert found["gathered_first"] - found["gathered_second"] == found["sharded"]


def test_short_contexts_have_more_sequences(llama: Path, group: RankGroup) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    snapshotter = Snapshotter(
        policy, group, engine_dtype="float32", dtype="float32", max_context=16
    )
    found = snapshotter.begin(0).canary
    assert [len(each.tokens) for each in found.sequences] == [16] * 32


@pytest.mark.parametrize(("damage", "says"), [(float("nan"), "nan nats"), (float("inf"), "nan")])
def test_a_trainer_that_is_broken_itself_is_said_to_be(
    llama: Path, group: RankGroup, damage: float, says: str
) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    snapshotter = Snapshotter(policy, group, engine_dtype="float32", dtype="float32")
    snapshotter.begin(0)
    with torch.no_grad():
        next(policy.parameters()).fill_(damage)
    with pytest.raises(InvalidError, match=rf"^canary: .* {says}.*The trainer itself is broken"):
        snapshotter.begin(1)


def test_snapshot_does_not_follow_the_weights(llama: Path, group: RankGroup) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    snapshotter = Snapshotter(policy, group, engine_dtype="float32", dtype="float32")
    snapshot, other = snapshotter.begin(0), snapshotter.begin(0)
    snapshotter.gather(snapshot)
    snapshotter.gather(other)
    before = {name: value.clone() for name, value in other.tensors}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in snapshot.tensors)


@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
def test_a_copy_leaves_the_attention_of_the_policy_alone(
    llama: Path, group: RankGroup, make_samples: Any, engine: str
) -> None:
    """A canary of another model of the same configuration must not make trees wrong."""
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    assert "tree" in policy.layouts
    data = columns(make_samples(6))
    found: list[torch.Tensor] = []
    for _ in range(2):
        batch = assemble(data, np.arange(data.num_sequences), "tree", group.device)
        assert batch is not None
        with torch.no_grad():
            scores = policy(
                batch.input_ids,
                batch.position_ids,
                batch.hidden_indices,
                batch.tokens.targets,
                batch.tokens.temperature,
                tree=batch.tree,
            )
        found.append(scores.logprobs)
        Snapshotter(policy, group, engine_dtype=engine, dtype="float32").begin(0)
    assert torch.equal(*found)


def test_a_check_with_other_weights_does_not_reach_a_copy(llama: Path, group: RankGroup) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    before = [weights.clone() for weights in local_shards(policy)]
    snapshotter = Snapshotter(policy, group, engine_dtype="float32", dtype="float32")
    source = snapshotter.source()
    with with_weights(policy, [weights + 1.0 for weights in before]):
        assert not torch.equal(local_shards(policy)[0], before[0])
        snapshot = snapshotter.begin(0, source)
        snapshotter.gather(snapshot)
    assert all(map(torch.equal, local_shards(policy), before))
    copied = dict(snapshot.tensors)
    names = {name: p for name, p in policy.inner.named_parameters() if name in copied}
    assert names
    assert all(torch.equal(copied[name], p.detach()) for name, p in names.items())


def test_chunks_are_ready_before_the_last_tensor_is_gathered(llama: Path, group: RankGroup) -> None:
    whole = copy(llama, group, engine="float32")
    tensors = list(whole.tensors)
    header = SnapshotHeader("j", 7, 4, 6, -1, 1, whole.num_bytes, 4096, whole.entries, whole.tied)
    staging, coming = Staging(header), TensorQueue()
    thread = threading.Thread(target=fill, args=(staging, coming))
    thread.start()
    for name, tensor in tensors[:-1]:
        coming.put(name, tensor)
    filled = whole.entries[-1].offset // 4096
    deadline = time.monotonic() + PATIENCE_S
    while staging.num_ready < filled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert staging.num_ready == filled
    assert not staging.complete
    coming.put(*tensors[-1])
    coming.end()
    thread.join()
    assert staging.complete


def test_a_failed_gather_is_reported(llama: Path, group: RankGroup) -> None:
    snapshot = copy(llama, group, engine="float32")
    staging = Staging(
        SnapshotHeader("j", 7, 4, 6, -1, 1, snapshot.num_bytes, 4096, snapshot.entries)
    )
    coming = TensorQueue()
    coming.put(*next(iter(snapshot.tensors)))
    coming.end(UnavailableError("a rank is gone"))
    with pytest.raises(UnavailableError, match="a rank is gone"):
        fill(staging, coming)
    assert not staging.complete


def test_tensors_without_a_consumer_are_not_kept() -> None:
    coming = TensorQueue()
    coming.close()
    coming.put("a", torch.zeros(4))
    coming.end()
    assert list(coming) == []


def test_nobody_waits_for_tensors_once_the_publication_is_over() -> None:
    coming = TensorQueue()
    coming.put("a", torch.zeros(1))
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(list, coming)
        coming.close()
        assert [name for name, _ in reader.result(timeout=PATIENCE_S)] == ["a"]


def test_tensors_that_wait_to_be_staged_are_bounded_but_never_hold_up_training() -> None:
    """Room comes as they are taken, and without anybody who takes them nobody waits for long."""
    coming = TensorQueue(most_bytes=8)
    with ThreadPoolExecutor(2) as pool:
        coming.put("large", torch.zeros(99))  # one is always taken
        second = pool.submit(coming.put, "b", torch.zeros(1))
        taken = iter(coming)
        time.sleep(0.05)
        assert not second.done()
        assert next(taken)[0] == "large"
        rest = pool.submit(list, taken)
        second.result(timeout=PATIENCE_S)
        coming.end()
        assert [name for name, _ in rest.result(timeout=PATIENCE_S)] == ["b"]
    nobody = TensorQueue(most_bytes=8)
    for name in "abc":
        nobody.put(name, torch.zeros(2))
    nobody.end()
    assert [name for name, _ in nobody] == ["a", "b", "c"]
