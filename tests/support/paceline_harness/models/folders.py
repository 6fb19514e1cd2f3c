"""Model folders that a gateway accepts, for tests in which nothing reads a model."""

from __future__ import annotations

from pathlib import Path

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without a tensor."""


def write_empty_model(folder: Path) -> None:
    """Write the files of a model that has neither words nor weights."""
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
