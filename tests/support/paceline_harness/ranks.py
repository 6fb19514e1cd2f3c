"""Where the ranks of a test compute."""

from __future__ import annotations

from collections.abc import Mapping

ON_CPU: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ""}
"""Added to the environment of ranks that no GPU may be given to."""


def place(ranks: int) -> Mapping[str, str]:
    """What to add to the environment of so many ranks: without a GPU for each, none is seen."""
    import torch

    return {} if torch.cuda.device_count() >= ranks else ON_CPU
