"""Engines that are built side by side leave torch as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from paceline_rollout.engines.sglang.layout import Layout
from paceline_rollout.engines.torch.model import TorchModel


def test_torch_initialises_weights_after_engines_were_built_at_once(
    model_of: Any, tmp_path: Path
) -> None:
    model_of().config.save_pretrained(tmp_path)

    def build(number: int) -> None:
        if number % 2:
            Layout(tmp_path)
        else:
            TorchModel(model_dir=tmp_path, dtype="float32", max_context=64, device="cpu")

    before = torch.nn.init.normal_
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(build, range(24)))
    assert torch.nn.init.normal_ is before
