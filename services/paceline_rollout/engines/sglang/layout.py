"""Names and shapes of a model's tensors, to reject a snapshot before it reaches the server.

SGLang skips unknown tensors and crashes on those with a wrong shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import InvalidError
from paceline.plugins import WeightSnapshot

Shape = tuple[int, ...]


class Layout:
    """Names and shapes of a model's tensors, from its `config.json`, without allocating them."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
        self._shapes: dict[str, Shape] = {n: tuple(t.shape) for n, t in model.state_dict().items()}
        self._required = {name for name, _ in model.named_parameters()}

    def check(self, snapshot: WeightSnapshot) -> None:
        """Raise `InvalidError` unless the snapshot is complete and fits the model."""
        names = {name for name, _ in snapshot.header.tied}
        for entry, _ in snapshot.tensors():
            shape = self._shapes.get(entry.name)
            if shape is None:
                raise InvalidError(f"snapshot: tensor {entry.name!r} is unknown to this model")
            if shape != tuple(entry.shape):
                text = f"snapshot: tensor {entry.name!r} has shape {tuple(entry.shape)}"
                raise InvalidError(f"{text}; allowed: {shape}")
            names.add(entry.name)
        if missing := sorted(self._required - names):
            raise InvalidError(f"snapshot: tensor {missing[0]!r} is missing")


def vocab_size(model_dir: Path) -> int:
    """Number of token ids, from `config.json`."""
    content: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return int(content.get("vocab_size") or content["text_config"]["vocab_size"])
