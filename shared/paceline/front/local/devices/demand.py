"""GPUs that a job asks for, from its job file and the size of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from paceline.config.job import JobSpec
from paceline.config.precision import with_dtype
from paceline.models.memory import (
    ModelSize,
    rollout_device_bytes,
    size_of,
    trainer_device_bytes,
)

_PARALLEL = ("tp", "pp", "dp")
"""Options of an engine whose product is the number of its GPUs."""
_WITHOUT_GPU = frozenset({"simulated"})
"""Engines that compute nothing."""


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """GPUs that one process asks for."""

    count: int
    """0: it computes on the CPU."""
    num_bytes: int = 0
    """At most, on each of them; 0: not known."""
    pinned: tuple[int, ...] = ()
    """Indices that the job file names for all processes of this kind."""


@dataclass(frozen=True, slots=True)
class DeviceDemand:
    """GPUs that a job asks for; its rollout workers are alike."""

    trainer: DeviceNeed
    rollout: DeviceNeed
    replicas: int
    """Rollout workers without which it does not start."""
    colocate: bool | None = None
    """Workers on the trainer's GPUs: always, never, or only where both do not fit apart."""

    @property
    def count(self) -> int:
        """GPUs of all its first processes, apart."""
        return self.trainer.count + self.replicas * self.rollout.count


def demand_of(spec: JobSpec, size: ModelSize | None = None) -> DeviceDemand:
    """Devices that a job asks for on a machine with GPUs.

    `size`: of its model; read from its folder if None, and not known if it is elsewhere.
    """
    size = size or size_of(Path(spec.model.path))
    spec = with_dtype(spec, "bfloat16")
    if spec.model.endpoint is not None:
        return DeviceDemand(DeviceNeed(0), DeviceNeed(0), replicas=0)
    bounds = spec.rollout.scaling
    return DeviceDemand(
        trainer=_trainer(spec, size),
        rollout=_rollout(spec, size),
        replicas=spec.rollout.replicas if bounds is None else bounds.min_replicas,
        colocate=spec.rollout.colocate,
    )


def _trainer(spec: JobSpec, size: ModelSize | None) -> DeviceNeed:
    devices = spec.trainer.devices
    if devices == "cpu":
        return DeviceNeed(0)
    num_bytes = trainer_device_bytes(spec, size) if size is not None else 0
    return DeviceNeed(spec.trainer.world_size, num_bytes, _indices(devices))


def _rollout(spec: JobSpec, size: ModelSize | None) -> DeviceNeed:
    count = rollout_gpus(spec)
    if not count:
        return DeviceNeed(0)
    num_bytes = rollout_device_bytes(spec, size, gpus=count) if size is not None else 0
    return DeviceNeed(count, num_bytes, _indices(spec.rollout.devices))


def rollout_gpus(spec: JobSpec) -> int:
    """GPUs that each rollout worker of a job computes on; 0: it computes on the CPU."""
    engine = spec.rollout.engine
    on_cpu = spec.rollout.devices == "cpu" or engine.options.get("device") == "cpu"
    return 0 if on_cpu or engine.kind in _WITHOUT_GPU else engine_gpus(engine.options)


def engine_gpus(options: Mapping[str, Any]) -> int:
    """GPUs of one engine with these options: its tensor, pipeline and data parallel sizes."""
    sizes = (options.get(name, 1) for name in _PARALLEL)
    return prod(size for size in sizes if isinstance(size, int) and size > 0)


def _indices(devices: str) -> tuple[int, ...]:
    return () if devices == "auto" else tuple(int(index) for index in devices.split(","))
