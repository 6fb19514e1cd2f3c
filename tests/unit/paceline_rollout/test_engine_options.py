"""What is checked at submit is what the engines take, with the same defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from paceline_rollout.engines.options import LengthOptions, SimulatedOptions, TorchOptions
from paceline_rollout.engines.simulated import Lengths, SimulatedEngine
from paceline_rollout.engines.torch.engine import TorchEngine

# What a worker gives every engine, and what only tests do.
GIVEN = {
    *("model_dir", "dtype", "max_context", "max_concurrent", "threads", "tokenizer_dir"),
    *("job_id", "clock"),
}


@pytest.mark.parametrize(
    ("model", "taker"),
    [
        (TorchOptions, TorchEngine),
        (SimulatedOptions, SimulatedEngine),
        (LengthOptions, Lengths),
    ],
)
def test_options_and_engine_agree(model: Any, taker: Any) -> None:
    taken = inspect.signature(taker).parameters
    defaults = {name: each.default for name, each in taken.items() if name not in GIVEN}
    assert {name: field.default for name, field in model.model_fields.items()} == defaults
