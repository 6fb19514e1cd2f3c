"""Options of the built-in engines; checked at submit, so this module does not import torch.

The engines document what they mean. `tests/unit/paceline_rollout/test_engine_options.py` checks
that both agree.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel


class TorchOptions(StrictModel):
    """`rollout.engine` of a job file with `kind: torch`."""

    device: str = "auto"
    flush_s: float = Field(default=0.25, ge=0)
    prefill_tokens: int = Field(default=512, ge=1)
    cache_bytes: int = Field(default=2 << 30, ge=0)
    least_shared: int = Field(default=128, ge=0)
    packed: bool = True


class LengthOptions(StrictModel):
    """Distribution of the lengths of simulated answers, in tokens."""

    kind: Literal["fixed", "uniform", "lognormal"] = "fixed"
    mean: float = Field(default=16.0, gt=0)
    sigma: float = Field(default=0.5, ge=0)
    low: int = Field(default=1, ge=1)
    high: int = Field(default=32, ge=1)


class SimulatedOptions(StrictModel):
    """`rollout.engine` of a job file with `kind: simulated`."""

    vocab_size: int = Field(default=0, ge=0)
    prefill_tokens_per_s: float = Field(default=100_000.0, gt=0)
    decode_tokens_per_s: float = Field(default=50.0, gt=0)
    batch_tokens_per_s: float = Field(default=0.0, ge=0)
    length: LengthOptions | None = None
    failure_rate: float = Field(default=0.0, ge=0, le=1)
    replies: tuple[str, ...] = Field(default=(), max_length=1000)
    load_s: float = Field(default=0.0, ge=0)
    tick_s: float = Field(default=0.01, gt=0)
    flush_s: float = Field(default=0.25, ge=0)
