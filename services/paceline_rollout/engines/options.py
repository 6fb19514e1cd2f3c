"""Options of the engines in the worker; checked at submit, so nothing here imports torch.

What they mean is with the engines. `tests/unit/paceline_rollout/test_engine_options.py` holds the
two against each other.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Closed


class TorchOptions(Closed):
    """What a job file may say under `rollout.engine` with `kind: torch`."""

    device: str = "cpu"
    flush_s: float = Field(default=0.25, ge=0)
    prefill_tokens: int = Field(default=512, ge=1)
    cache_bytes: int = Field(default=2 << 30, ge=0)
    least_shared: int = Field(default=128, ge=0)
    packed: bool = True


class LengthOptions(Closed):
    """How long simulated answers are."""

    kind: Literal["fixed", "uniform", "lognormal"] = "fixed"
    mean: float = Field(default=16.0, gt=0)
    sigma: float = Field(default=0.5, ge=0)
    low: int = Field(default=1, ge=1)
    high: int = Field(default=32, ge=1)


class SimulatedOptions(Closed):
    """What a job file may say under `rollout.engine` with `kind: simulated`."""

    vocab_size: int = Field(default=0, ge=0)
    prefill_tokens_per_s: float = Field(default=100_000.0, gt=0)
    decode_tokens_per_s: float = Field(default=50.0, gt=0)
    batch_tokens_per_s: float = Field(default=0.0, ge=0)
    length: LengthOptions | None = None
    failure_rate: float = Field(default=0.0, ge=0, le=1)
    load_s: float = Field(default=0.0, ge=0)
    tick_s: float = Field(default=0.01, gt=0)
    flush_s: float = Field(default=0.25, ge=0)
