"""Loading: each rank its own rows of the files, and clear errors for files that are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.errors import ConfigError
from paceline_trainer.step.loading import load_policy

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
