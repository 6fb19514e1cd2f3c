"""Gives the processes of a job their GPUs. Pure functions.

A GPU belongs to one job at a time. Its processes have GPUs of their own or, colocated, the rollout
workers those of the trainer, all of them resident together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.front.local.devices.demand import DeviceDemand, DeviceNeed
from paceline.front.local.devices.device import Device, listed
from paceline.platform.text import human_bytes

Indices = tuple[int, ...]
TRAINER = "trainer"


def worker(number: int) -> str:
    """Role of a rollout worker of a job."""
    return f"rollout-{number}"


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs by role; none: the process computes on the CPU."""

    roles: Mapping[str, Indices]
    colocated: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def used(self) -> set[int]:
        """All GPUs of the job."""
        return {index for indices in self.roles.values() for index in indices}


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a job cannot be placed, for people."""

    text: str
    possible: bool = True
    """Whether it can once other jobs have ended."""


@dataclass(frozen=True, slots=True)
class _Free:
    """GPUs that may be given away, while they are."""

    devices: dict[int, Device]
    taken: dict[str, Indices] = field(default_factory=dict[str, Indices])

    def give(self, role: str, need: DeviceNeed, *, largest: bool) -> bool:
        """Give a process its GPUs; False if there are not enough that are large enough."""
        indices = _choose(need, list(self.devices.values()), largest=largest)
        if indices is None:
            return False
        for index in indices:
            del self.devices[index]
        self.taken[role] = indices
        return True


def place(
    demand: DeviceDemand,
    devices: Sequence[Device],
    *,
    taken: Collection[int] = (),
    kept: Mapping[str, Indices] | None = None,
) -> Placement | Lack:
    """Place the first processes of a job, its trainer and `demand.replicas` workers.

    `taken` are GPUs of other jobs, `kept` those that its processes already have.
    """
    kept = kept or {}
    if not demand.count or not devices:
        return Placement(dict.fromkeys(_roles(demand), ()))
    if (lack := _impossible(demand, devices)) is not None:
        return lack
    free = [device for device in devices if device.index not in taken]
    if demand.colocate is not True:
        if (placement := _apart(demand, free, kept)) is not None:
            return placement
        if _apart(demand, devices, {}) is not None:
            return _busy(demand, devices, free)
    if demand.colocate is not False and demand.trainer.count and demand.rollout.count:
        if (placement := _together(demand, free, kept)) is not None:
            return placement
        if _together(demand, devices, {}) is not None:
            return _busy(demand, devices, free)
    return _too_small(demand, devices)


def more(
    demand: DeviceDemand, devices: Sequence[Device], *, taken: Collection[int], own: Placement
) -> Indices | None:
    """GPUs for one more rollout worker of a placed job; None: there are none."""
    if not demand.rollout.count or not devices:
        return ()
    if own.colocated:
        return None
    used = {*taken, *own.used}
    return _choose(demand.rollout, [device for device in devices if device.index not in used])


def memory_share(
    demand: DeviceDemand, placement: Placement, devices: Sequence[Device]
) -> float | None:
    """The share of its GPUs' memory that a rollout worker may take; None: all of it.

    That is what colocated trainers leave, a tenth less, shared evenly among the workers of a GPU.
    """
    if not placement.colocated or not devices:
        return None
    room = min(device.free_bytes for device in devices)
    left = (room - demand.trainer.num_bytes) / room if demand.trainer.num_bytes else 0.5
    workers = [indices for role, indices in placement.roles.items() if role != TRAINER]
    most = max(sum(d.index in indices for indices in workers) for d in devices)
    return round(0.9 * left / most, 3)


def _roles(demand: DeviceDemand) -> list[str]:
    return [TRAINER, *(worker(number) for number in range(demand.replicas))]


def _needs(demand: DeviceDemand) -> list[tuple[str, DeviceNeed]]:
    """Processes that want GPUs, those that need most of each first: they have the least choice."""
    needs = [
        (role, demand.trainer if role == TRAINER else demand.rollout) for role in _roles(demand)
    ]
    wanting = [(role, need) for role, need in needs if need.count]
    return sorted(wanting, key=lambda pair: (not pair[1].pinned, -pair[1].num_bytes))


def _apart(
    demand: DeviceDemand, free: Sequence[Device], kept: Mapping[str, Indices]
) -> Placement | None:
    """Who needs most gets the largest GPUs if that works out, else the smallest that suffice."""
    return _filled(demand, free, kept, largest=True) or _filled(demand, free, kept, largest=False)


def _filled(
    demand: DeviceDemand, free: Iterable[Device], kept: Mapping[str, Indices], *, largest: bool
) -> Placement | None:
    room = _Free({device.index: device for device in free})
    for role, indices in kept.items():
        room.taken[role] = indices
        for index in indices:
            room.devices.pop(index, None)
    for role, need in _needs(demand):
        if role not in room.taken and not room.give(role, need, largest=largest):
            return None
    roles = {role: room.taken.get(role, ()) for role in [*_roles(demand), *kept]}
    return Placement(roles)


def _together(
    demand: DeviceDemand, free: Sequence[Device], kept: Mapping[str, Indices]
) -> Placement | None:
    """The trainer, and all workers on its GPUs in turn, so that each GPU has as many."""
    trainer, rollout, workers = demand.trainer, demand.rollout, demand.replicas
    workers_on_each = -(-workers * rollout.count // max(trainer.count, rollout.count))
    width = max(trainer.count, rollout.count)
    num_bytes = trainer.num_bytes + workers_on_each * rollout.num_bytes
    own = kept.get(TRAINER) or next(iter(kept.values()), ())
    indices = own or _choose(
        DeviceNeed(width, num_bytes, trainer.pinned),
        [d for d in free if not d.is_slice or width == 1],
    )
    if indices is None:
        return None
    roles = {TRAINER: indices[: trainer.count]}
    for number in range(workers):
        first = number * rollout.count % width
        roles[worker(number)] = tuple(
            indices[(first + step) % width] for step in range(rollout.count)
        )
    unknown = not (trainer.num_bytes and rollout.num_bytes)
    text = "trainer and rollout workers share GPUs, and whether both fit is not known"
    return Placement({**roles, **kept}, colocated=True, warnings=(text,) if unknown else ())


def _choose(need: DeviceNeed, free: Sequence[Device], *, largest: bool = False) -> Indices | None:
    """GPUs that are large enough, the smallest or the largest; None: too few are.

    Several are alike if so many are, and whole: slices of MIG do not compute together.
    """
    fitting = [
        device
        for device in free
        if device.free_bytes >= need.num_bytes
        and not (need.count > 1 and device.is_slice)
        and (not need.pinned or device.index in need.pinned)
    ]
    kinds = Counter((device.num_bytes, device.name) for device in fitting)
    alike = [kind for kind, number in kinds.items() if number >= need.count]
    if alike:
        kind = (max if largest else min)(alike)
        fitting = [device for device in fitting if (device.num_bytes, device.name) == kind]
    sign = -1 if largest else 1
    ordered = sorted(fitting, key=lambda device: (sign * device.free_bytes, device.index))
    return _indices(ordered[: need.count]) if len(ordered) >= need.count else None


def _indices(devices: Iterable[Device]) -> Indices:
    return tuple(sorted(device.index for device in devices))


def _impossible(demand: DeviceDemand, devices: Sequence[Device]) -> Lack | None:
    """Indices that there are not, or that are too few."""
    known = {device.index for device in devices}
    wanted = (
        ("trainer.devices", demand.trainer, demand.trainer.count),
        ("rollout.devices", demand.rollout, demand.rollout.count * demand.replicas),
    )
    for name, need, count in wanted:
        if strange := sorted(set(need.pinned) - known):
            have = ", ".join(str(index) for index in sorted(known))
            return Lack(f"{name}: there is no GPU {strange[0]} here; there are {have}", False)
        if need.pinned and len(set(need.pinned)) < count and demand.colocate is not True:
            return Lack(f"{name}: it names {len(set(need.pinned))} GPUs of {count}", False)
    return None


def wants(demand: DeviceDemand) -> str:
    """A demand in words: `4 GPUs (trainer 2, 2 rollout workers with 1 each)`."""
    parts: list[str] = []
    if demand.trainer.count:
        parts.append(f"trainer {demand.trainer.count}")
    if demand.rollout.count and demand.replicas:
        plural = "s" if demand.replicas > 1 else ""
        per_worker = " each" if demand.replicas > 1 else ""
        parts.append(
            f"{demand.replicas} rollout worker{plural} with {demand.rollout.count}{per_worker}"
        )
    return f"{demand.count} GPU{'s' if demand.count > 1 else ''} ({', '.join(parts)})"


def _busy(demand: DeviceDemand, devices: Sequence[Device], free: Sequence[Device]) -> Lack:
    verb = "is" if len(free) == 1 else "are"
    names = f" ({listed(free)})" if free else ""
    return Lack(f"it needs {wants(demand)}, and {len(free)} of {len(devices)} {verb} free{names}")


def _too_small(demand: DeviceDemand, devices: Sequence[Device]) -> Lack:
    """The lack of a machine for a job, whatever else runs there."""
    largest = max(device.free_bytes for device in devices)
    short = [
        f"{what} needs {human_bytes(need.num_bytes)} of each GPU"
        for what, need in (("the trainer", demand.trainer), ("a rollout worker", demand.rollout))
        if need.count and need.num_bytes > largest
    ]
    if short:
        return Lack(f"{' and '.join(short)}, and the largest has {human_bytes(largest)}", False)
    text = f"it needs {wants(demand)}, and this machine has {len(devices)}"
    if max(demand.trainer.count, demand.rollout.count) > 1 and any(d.is_slice for d in devices):
        text += ", slices of MIG, each of which computes alone"
    both = demand.trainer.num_bytes + demand.rollout.num_bytes
    if demand.colocate is not False and min(demand.trainer.num_bytes, demand.rollout.num_bytes):
        text += f"; together on a GPU they need {human_bytes(both)} of {human_bytes(largest)}"
    return Lack(text, False)
