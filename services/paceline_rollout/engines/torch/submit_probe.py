"""Whether the torch engine can compute the model of a `config.json`; see `model_probe`."""

from __future__ import annotations

from typing import Any

import torch

from paceline.models.foreign_code import of_model
from paceline.models.model_probe import answer
from paceline.weights.names import CheckpointNames
from paceline_rollout.engines.torch.model import check_layers, read_config
from paceline_rollout.engines.torch.probe import shares_prefixes


def check(config: Any) -> None:
    """Raise `InvalidError` for a model whose log-probs this engine would not compute."""
    check_layers(config.get_text_config())
    shares_prefixes(config, "cpu")
    with of_model("model.path: config.json"):
        CheckpointNames(config)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(read_config, check)
