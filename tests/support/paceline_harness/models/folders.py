"""Model folders that a gateway accepts, for tests in which nothing reads a model."""

from __future__ import annotations

import json
import string
from pathlib import Path

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without a tensor."""


def write_empty_model(folder: Path) -> None:
    """Write the files of a model that has neither words nor weights."""
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)


def write_readable_model(folder: Path) -> None:
    """Write a model without weights whose tokenizer has a word for each printable character."""
    write_empty_model(folder)
    words = {word: number for number, word in enumerate(["<unk>", *string.printable])}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": ""},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    config = {"vocab_size": len(words), "max_position_embeddings": 8192}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config))
