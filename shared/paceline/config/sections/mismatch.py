"""The section `trainer.mismatch` of a job file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel


class MismatchSpec(StrictModel):
    """Mismatch between log-probs of engine and trainer, measured once for every version."""

    sequences: int = Field(default=2, ge=0, le=4096)
    """Per version and rank, recomputed with the weights that sampled them."""
    bytes: int = Field(default=1 << 30, ge=0, le=1 << 44)
    """Host memory per rank for weights of past versions; those that do not fit are not checked."""
    on_excess: Literal["stop", "warn"] = "stop"
    """Where `mismatch_kl` of three versions running is above 0.05 and 20 times the trainer's own
    noise: `stop` starts a rollout worker again if others agree with the trainer, and fails the job
    if none does; `warn` only says so."""
