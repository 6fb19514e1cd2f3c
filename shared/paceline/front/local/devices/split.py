"""How many GPUs of a machine a trainer and its rollout workers should have.

An estimate before anything is measured: a trainer computes `6 N` operations per token (`8 N` with
gradient checkpointing) at 40 % of what a card can do, and a decode step takes 0.2 ms per layer and
the time to read all weights, and the keys and values of the open requests, from memory. Once a job
runs, what it needs is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.job import JobSpec
from paceline.front.local.devices.demand import engine_gpus
from paceline.front.local.devices.device import Device
from paceline.models.memory import ModelSize

_UTILISATION = 0.4
_BANDWIDTH_SHARE = 0.6
_LAYER_S = 0.0002
_CARDS = {
    "H200": (990e12, 4.8e12),
    "H100": (990e12, 3.35e12),
    "H20": (148e12, 4.0e12),
    "B200": (2250e12, 8.0e12),
    "A100": (312e12, 2.0e12),
    "L40S": (362e12, 0.86e12),
    "L4": (121e12, 0.3e12),
    "A10": (125e12, 0.6e12),
    "4090": (165e12, 1.0e12),
}
"""Dense bfloat16 operations and bytes per second, of the makers' data sheets."""
_USUAL = _CARDS["H100"]


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """A trainer of `world_size` ranks and `replicas` rollout workers."""

    world_size: int
    replicas: int
    bound_s: float
    """Estimated seconds per step."""


def split_of(spec: JobSpec, size: ModelSize, devices: list[Device]) -> DeviceSplit | None:
    """The split of all `devices` with the shortest step; None: they are too few for two parts."""
    engine = engine_gpus(spec.rollout.engine.options)
    splits = [
        _split(spec, size, devices[0], ranks, (len(devices) - ranks) // engine, engine)
        for ranks in range(1, len(devices) - engine + 1)
    ]
    return min(splits, key=lambda split: (split.bound_s, split.world_size), default=None)


def _split(
    spec: JobSpec, size: ModelSize, card: Device, ranks: int, replicas: int, engine: int
) -> DeviceSplit:
    rate, bandwidth = next((v for k, v in _CARDS.items() if k in card.name), _USUAL)
    episodes = spec.experience.batch_groups * spec.experience.group_size
    sampled = min(spec.sampling.max_tokens, spec.sampling.max_context) / 2
    tokens = episodes * min(spec.sampling.max_context, 2 * sampled)
    operations = 8 if spec.trainer.gradient_checkpointing else 6
    training_s = tokens * operations * size.parameters / (_UTILISATION * rate * ranks)
    overlap = max(1, spec.experience.max_staleness)
    requests = min(spec.rollout.max_concurrent, max(1.0, overlap * episodes / replicas))
    read = 2 * size.parameters + requests * sampled * size.token_bytes
    step_s = size.layers * _LAYER_S + read / (_BANDWIDTH_SHARE * bandwidth * engine)
    sampling_s = episodes * sampled * step_s / (requests * replicas)
    together = training_s + sampling_s
    bound_s = max(training_s, sampling_s) if spec.experience.max_staleness else together
    return DeviceSplit(ranks, replicas, bound_s)
