"""A random Llama of some thousand parameters with a character tokenizer, and a small job for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.platform.files import locked

TINY = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
names = ["<pad>", "<bos>", "<eos>", *"0123456789+-*=", " "]
tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer.decoder = decoders.Fuse()
tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
tokenizer.save(str(folder / "tokenizer.json"))
settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
(folder / "tokenizer_config.json").write_text(json.dumps(settings))
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(names), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
)
LlamaForCausalLM(config).save_pretrained(folder)
"""


def tiny_model_in(models: Path) -> Path:
    """The model's folder below `models`.

    Made once for all processes of a run, as its imports take seconds.
    """
    folder = models / "tiny"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with locked(folder.with_suffix(".lock")):
        if not (folder / "config.json").exists():
            part = folder.with_suffix(".part")
            subprocess.run([sys.executable, "-c", TINY, str(part)], check=True, env=environment)
            part.rename(folder)
    return folder


def tiny_job_of(model: Path, /, **sections: Any) -> dict[str, Any]:
    """A small job as a dictionary; `sections` replace whole sections."""
    job: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(model)},
        "tasks": {"environment": "arithmetic", "options": {"digits": 1}},
        "eval": {"every": 10, "tasks": 16, "options": {"split": "heldout"}},
        "sampling": {"max_tokens": 4, "max_context": 32},
        "reward": [{"kind": "exact"}],
        "experience": {"batch_groups": 4, "group_size": 4, "filters": [], "lease_s": 3.0},
        "trainer": {"optimizer": {"lr": 1e-4}, "checkpoint": {"every": 5}},
        "stop": {"steps": 20},
    }
    job.update(sections)
    return job
