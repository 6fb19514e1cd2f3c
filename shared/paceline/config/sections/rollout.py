"""The section `rollout` of a job file."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field

from paceline.config.base import Name, PluginSpec
from paceline.plugins import StrictModel

Threads = Literal["auto"] | Annotated[int, Field(gt=0, le=1024)]
"""Threads of a process. `auto`: one for a small model, else all cores of the machine, which its
processes share."""


def _as_text(value: Any) -> Any:
    """One index, or a list of them, as the text that stands for it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, (list, tuple)):
        return ",".join(str(index) for index in cast("list[Any]", value))
    return value


Devices = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|\d{1,4}(,\d{1,4})*)$", max_length=5000),
    BeforeValidator(_as_text),
]
"""Where a process computes: `auto`, `cpu`, or indices of GPUs of one machine (`"0,1"`)."""
CANARY_RATIO = 2.0
"""Correct engines stay below 1.2 times the noise, wrong names, orders and shards above 2.1."""
CANARY_FLOOR = 2e-4


class ReplicaBounds(StrictModel):
    """Bounds for the number of rollout workers of a scaled job."""

    min_replicas: int = Field(default=1, gt=0, le=10_000)
    """Fewest rollout workers."""
    max_replicas: int = Field(gt=0, le=10_000)
    """Most rollout workers."""


class CanarySpec(StrictModel):
    """Limits on how an engine's log-probs of the canary differ from the trainer's.

    Differences are trimmed: the root mean square without the largest 5 %.
    """

    ratio: float = Field(default=CANARY_RATIO, gt=0.0, le=1000.0)
    """Largest allowed difference, in units of the noise that the trainer measures for the
    precision of `model.dtype`."""
    floor: float = Field(default=CANARY_FLOOR, ge=0.0, le=1.0)
    """Nats that are allowed in any case, as float32 has next to no noise."""


class RolloutSpec(StrictModel):
    """Rollout workers and their engine."""

    engine: PluginSpec = PluginSpec(kind="torch")
    """Generates the tokens."""
    replicas: int = Field(default=1, gt=0, le=10_000)
    """Rollout workers at the start; constant without `scaling`."""
    scaling: ReplicaBounds | None = None
    pools: tuple[Name, ...] = Field(default=(), max_length=64)
    """Pools of the installation that the job may use; all of them, cheapest first, if empty."""
    activation: Literal["in_flight", "interrupt", "at_boundary"] = "in_flight"
    """How running requests get new weights: `in_flight` keeps the KV cache, `interrupt` recomputes
    it, `at_boundary` lets them finish with the old ones."""
    max_concurrent: int = Field(default=512, gt=0, le=65_536)
    """Concurrent requests per engine; further ones wait."""
    devices: Devices = "auto"
    """`auto`: as many GPUs as the workers' engines need (`tp` x `pp` x `dp` each), and the CPU on a
    machine without GPUs; `cpu`; or, on one machine, the GPUs of all workers (`"1,2,3"`)."""
    colocate: bool | None = None
    """On one machine: whether workers compute on the trainer's GPUs, for which both have to fit
    into their memory; if null, where it has too few GPUs for both apart."""
    threads: Threads = "auto"
    """Threads of an engine that computes on a CPU."""
    canary: CanarySpec = CanarySpec()
    """The check of weights that an engine has loaded."""
    canary_tolerance: float | None = Field(default=None, gt=0.0, le=1000.0)
    """Deprecated and without effect: `canary` has what is allowed."""
