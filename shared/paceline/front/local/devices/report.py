"""Devices that a job would get on a machine: for people before it starts, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.base import PluginSpec
from paceline.config.job import JobSpec
from paceline.config.sections.lora import LoraSpec
from paceline.front.local.devices.demand import DeviceDemand, demand_of, engine_gpus
from paceline.front.local.devices.device import Device, listed, summary
from paceline.front.local.devices.discovery import devices_here
from paceline.front.local.devices.placement import TRAINER, Lack, Placement, place, wants
from paceline.front.local.devices.split import split_of
from paceline.models.memory import UNKNOWN_SIZE, ModelSize, size_of
from paceline.platform.text import human_bytes


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """GPUs of a machine, and which of them the processes of a job get."""

    devices: tuple[Device, ...]
    demand: DeviceDemand
    placement: Placement | None
    refusal: str = ""
    warnings: tuple[str, ...] = ()

    def bytes_on(self, index: int) -> int:
        """Bytes that the job needs at most of a GPU; 0: none, or not known."""
        roles = self.placement.roles if self.placement is not None else {}
        needs = (
            self.demand.trainer if role == TRAINER else self.demand.rollout
            for role, indices in roles.items()
            if index in indices
        )
        return sum(need.num_bytes for need in needs)

    def lines(self) -> Iterator[str]:
        """Lines to print."""
        yield f"devices: {summary(self.devices)}"
        if self.placement is None:
            yield f"refused: {self.refusal}"
            return
        if self.devices:
            yield f"asks for: {wants(self.demand) if self.demand.count else 'no GPU'}"
        for device in self.devices:
            yield self._line_of(device)
        on_cpu = [role for role, indices in self.placement.roles.items() if not indices]
        if on_cpu:
            yield f"on the CPU: {', '.join(on_cpu)}"
        if self.placement.colocated:
            yield "colocated: trainer and rollout workers stay resident on the same GPUs"
        for text in self.warnings:
            yield f"warning: {text}"

    def document(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "devices": [
                {
                    "index": device.index,
                    "name": device.name,
                    "bytes": device.num_bytes,
                    "used_bytes": device.used_bytes,
                    "planned_bytes": self.bytes_on(device.index),
                }
                for device in self.devices
            ],
            "roles": {
                role: list(indices)
                for role, indices in (self.placement.roles if self.placement else {}).items()
            },
            "colocated": self.placement is not None and self.placement.colocated,
            "refusal": self.refusal,
            "warnings": list(self.warnings),
        }

    def _line_of(self, device: Device) -> str:
        assert self.placement is not None
        roles = [r for r, indices in self.placement.roles.items() if device.index in indices]
        if not roles:
            return f"{device}: unused"
        need = self.bytes_on(device.index)
        most = f"at most {human_bytes(need)} of {human_bytes(device.free_bytes)}"
        memory = most if need else "memory not known"
        return f"{device}: {', '.join(roles)} ({memory})"


def plan_of(spec: JobSpec, devices: Sequence[Device], size: ModelSize | None = None) -> DevicePlan:
    """Plan a job onto devices that no other job has."""
    size = size or size_of(Path(spec.model.path))
    demand = demand_of(spec, size)
    placement = place(demand, devices)
    if isinstance(placement, Lack):
        remedy = "" if size is None else _remedy(spec, size, devices)
        return DevicePlan(tuple(devices), demand, None, refusal=placement.text + remedy)
    unknown = [f"memory is not known: {UNKNOWN_SIZE}"] if size is None and devices else []
    warnings = (*unknown, *placement.warnings, *_unused(spec, size, devices, placement))
    return DevicePlan(tuple(devices), demand, placement, warnings=warnings)


def plan_here(spec: JobSpec) -> DevicePlan | None:
    """Plan a job onto the GPUs of this machine; None: it has none."""
    devices = devices_here()
    return plan_of(spec, devices) if devices else None


_REMEDIES = (
    {"gradient_checkpointing": True},
    {"lora": LoraSpec()},
    {"lora": LoraSpec(), "gradient_checkpointing": True},
)


def _remedy(spec: JobSpec, size: ModelSize, devices: Sequence[Device]) -> str:
    """The least change of trainer and engine with which the job fits; empty: there is none."""
    for changed in _changes(spec, len(devices)):
        demand = demand_of(changed, size)
        if not isinstance(place(demand, devices), Lack):
            return f"; it fits with {' and '.join(_fields(spec, changed))}"
    return ""


def _changes(spec: JobSpec, num_gpus: int) -> Iterator[JobSpec]:
    """The job with other fields, the least change first."""
    ranks = range(spec.trainer.world_size + 1, num_gpus + 1)
    trainers = [{}, *({"world_size": number} for number in ranks), *_REMEDIES]
    engine = spec.rollout.engine
    tp = int(engine.options.get("tp", 1))
    engines = [engine]
    if engine.kind == "sglang":
        engines += [
            PluginSpec(kind=engine.kind, **{**engine.options, "tp": tp * times})
            for times in (2, 4, 8)
            if tp * times < num_gpus
        ]
    for other in engines:
        for change in trainers:
            trainer = spec.trainer.model_copy(update=change)
            room = max(1, (num_gpus - trainer.world_size) // engine_gpus(other.options))
            replicas = (
                spec.rollout.replicas if other is engine else min(spec.rollout.replicas, room)
            )
            rollout = spec.rollout.model_copy(update={"engine": other, "replicas": replicas})
            yield spec.model_copy(update={"trainer": trainer, "rollout": rollout})


def _fields(before: JobSpec, after: JobSpec) -> Iterator[str]:
    for name in ("world_size", "lora", "gradient_checkpointing"):
        value = getattr(after.trainer, name)
        if value != getattr(before.trainer, name):
            yield f"trainer.{name}: {_written(value)}"
    tp = after.rollout.engine.options.get("tp", 1)
    if tp != before.rollout.engine.options.get("tp", 1):
        yield f"rollout.engine.tp: {tp}"
    if after.rollout.replicas != before.rollout.replicas:
        yield f"rollout.replicas: {after.rollout.replicas}"


def _written(value: object) -> str:
    return "{}" if isinstance(value, LoraSpec) else str(value).lower()


def _unused(
    spec: JobSpec, size: ModelSize | None, devices: Sequence[Device], placement: Placement
) -> Iterator[str]:
    """Which GPUs do nothing for the job, and the fields that would use them."""
    unused = [device for device in devices if device.index not in placement.used]
    if not unused:
        return
    text = f"{listed(unused)} of {len(devices)} would be unused"
    whole = [device for device in devices if not device.is_slice]
    split = None if size is None else split_of(spec, size, whole)
    if split is not None and (split.world_size, split.replicas) != (
        spec.trainer.world_size,
        spec.rollout.replicas,
    ):
        text += (
            f"; with trainer.world_size: {split.world_size} and rollout.replicas: "
            f"{split.replicas} all would be busy for about as long (an estimate)"
        )
    yield text
