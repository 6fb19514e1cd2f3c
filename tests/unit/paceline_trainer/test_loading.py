"""Loading: each rank its own rows of the files, and clear errors for files that are wrong."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.enums import Phase
from paceline.errors import ConfigError, InvalidError
from paceline.platform.server.phase_report import PhaseReport
from paceline_harness.models.families import save_family
from paceline_harness.patience import PATIENCE_S
from paceline_trainer.phase_clock import report_loading
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import fetch, load_policy, open_policy
from paceline_trainer.step.model import shard

SLACK = 4 << 20  # allocator and small objects


def saved(path: Path, *, shard_size: str = "5GB", **options: Any) -> Path:
    """A model of random weights in bfloat16."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "vocab_size": 101,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(**(shape | options))
    LlamaForCausalLM(config).bfloat16().save_pretrained(path, max_shard_size=shard_size)
    return path


def test_a_rank_holds_its_shard_and_one_unit_while_loading(run_ranks: Any, tmp_path: Path) -> None:
    wide = {"hidden_size": 513, "num_attention_heads": 3, "head_dim": 64}
    path = saved(
        tmp_path / "model",
        shard_size="20MB",
        **wide,
        intermediate_size=1531,
        num_hidden_layers=12,
        vocab_size=4001,
        tie_word_embeddings=True,
    )
    assert len(list(path.glob("*.safetensors"))) > 1
    (tmp_path / "job.json").write_text(json.dumps({"path": str(path)}))
    run_ranks(2, "load", tmp_path)
    root = 4001 * 513 * 4  # the largest unit: embeddings, which are the head too
    for rank in range(2):
        found = json.loads((tmp_path / f"load-{rank}.json").read_text())
        assert found["logprobs"] == 0.0
        assert all(found["weights"])
        assert found["peak"] <= found["shard"] + root + SLACK


def test_weights_under_other_names_are_converted(tmp_path: Path) -> None:
    path = saved(tmp_path)
    expected = load_policy(str(path))
    file = path / "model.safetensors"
    tensors = load_file(file)
    # Names without the prefix, as a saved base model has them.
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, file, {"format": "pt"})
    found = load_policy(str(path))
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 95}))
    with pytest.raises(ConfigError, match=r"gate_proj.weight.*\(96, 64\).*\(95, 64\)"):
        load_policy(str(path))
    (path / "config.json").write_text(json.dumps(config))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.path: cannot read"):
        load_policy(str(path))
    outside = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    shutil.copy(file, path.parent)
    (path / "model.safetensors.index.json").write_text(json.dumps(outside))
    with pytest.raises(ConfigError, match=r"not a plain file"):
        load_policy(str(path))


# Tensors that are left out, and a prefix for the names of the others.
INCOMPLETE = {
    "of a model with fewer layers": ("model.layers.2.", ""),
    "without the head": ("lm_head.", ""),
    "of a wrapper": ("none", "module."),
    "of a compiled model": ("none", "_orig_mod."),
}


@pytest.mark.parametrize("title", INCOMPLETE)
def test_files_that_leave_weights_random_are_refused(tmp_path: Path, title: str) -> None:
    without, prefix = INCOMPLETE[title]
    file = saved(tmp_path) / "model.safetensors"
    left = {f"{prefix}{n}": v for n, v in load_file(file).items() if not n.startswith(without)}
    save_file(left, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack \d+ tensors of the model that config\.json"):
        load_policy(str(tmp_path))


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan


def with_another_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def as_they_are(tensors: dict[str, torch.Tensor]) -> None:
    """Nothing is changed."""


@pytest.mark.parametrize(
    ("family", "change", "config", "told"),
    [
        ("llama", with_nan, {}, r"not finite: .*layers\.0\.mlp\.up_proj\.weight has NaN"),
        ("llama_tied", with_another_head, {}, r"lm_head.weight .*differ, but .*tie_word_embeddin"),
        ("qwen3_moe", as_they_are, {"moe_intermediate_size": 8}, "has other tensors than its con"),
        ("smollm3", as_they_are, {"no_rope_layers": [1]}, r"cannot train it \(IndexError: list"),
        ("llama", as_they_are, {"rms_norm_eps": "1e-6"}, "'rms_norm_eps' expected float"),
    ],
)
def test_what_the_model_cannot_be_made_of_is_named(
    family: str, change: Any, config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = save_family(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | config))
    with pytest.raises(InvalidError, match=told):
        load_policy(str(folder))


def test_a_head_that_is_saved_beside_its_embedding_may_be_the_same(tmp_path: Path) -> None:
    file = save_family("llama_tied", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(twice, file, {"format": "pt"})
    found = dict(load_policy(str(tmp_path)).named_parameters())
    assert any(torch.equal(each, twice["lm_head.weight"]) for each in found.values())


class Told(PhaseReport):
    """Remembers all that it is told."""

    def __init__(self) -> None:
        super().__init__(Phase.LOADING_MODEL)
        self.all: list[tuple[float, float]] = []

    def reached(self, done: float, total: float = 0.0) -> None:
        """Remember it."""
        super().reached(done, total)
        self.all.append((self.now.done, self.now.total))


def test_bytes_are_reported_while_a_tensor_is_read(tmp_path: Path, group: RankGroup) -> None:
    """Of embeddings of 40 MiB some are there before all of them; in the end all of the model is."""
    path = saved(tmp_path, vocab_size=160_001, tie_word_embeddings=True)
    report = Told()
    policy = open_policy(str(path), report=report)
    assert len(report.all) > 3  # the first layers are read for a trial
    report_loading(policy, 1, report)
    report.all.clear()
    shard(policy, group, dtype="float32")
    dones, (total,) = [done for done, _ in report.all], {total for _, total in report.all}
    assert dones == sorted(dones)
    assert dones[-1] == total == sum(p.nbytes for p in policy.parameters())
    steps = [after - before for before, after in zip([0.0, *dones], dones, strict=False)]
    assert max(steps) <= 16 << 20
    stored = load_file(path / "model.safetensors")
    for name, value in policy.inner.named_parameters():
        assert torch.equal(value, stored[name].float()), name


def test_a_slow_file_is_no_stall(tmp_path: Path) -> None:
    """A named pipe stands for a slow disk: what has come is reported before the rest comes."""
    files = {"a": "fast.safetensors", "b": "slow.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "fast.safetensors").write_bytes(bytes(1000))
    os.mkfifo(tmp_path / "slow.safetensors")
    report = PhaseReport(Phase.LOADING_MODEL)
    reading = threading.Thread(target=fetch, args=(tmp_path, report))
    reading.start()
    with (tmp_path / "slow.safetensors").open("wb", buffering=0) as slow:
        for piece in range(1, 4):
            slow.write(bytes(500))
            deadline = time.monotonic() + PATIENCE_S
            while report.now.done < 1000 + 500 * piece and time.monotonic() < deadline:
                time.sleep(0.005)
            assert report.now.done == 1000 + 500 * piece
            assert reading.is_alive()
    reading.join(PATIENCE_S)
    assert not reading.is_alive()
