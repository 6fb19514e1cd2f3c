"""Which GPUs of this machine the processes of started jobs have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.enums import JobState, WorkerKind
from paceline.front.local.devices.demand import DeviceDemand, demand_of
from paceline.front.local.devices.device import Device, listed
from paceline.front.local.devices.placement import (
    TRAINER,
    Indices,
    Lack,
    Placement,
    memory_share,
    more,
    place,
    worker,
)
from paceline.platform.telemetry.logs import Log
from paceline_controller.jobs.plan import LiveJob, Wanted, trainer_name

Held = Mapping[str, Mapping[str, Indices]]
"""GPUs by job and process."""
# In these states no process of a job has begun, or none is left.
_WITHOUT_GPUS = frozenset({JobState.QUEUED, JobState.PAUSED})
log = Log("placements")


@dataclass(slots=True)
class _Job:
    """A job that has GPUs, or is to get some."""

    demand: DeviceDemand
    placement: Placement | None = None
    lack: str = ""
    roles: dict[str, str] = field(default_factory=dict[str, str])  # by process


class DeviceRoom:
    """GPUs that are free, while queued jobs are admitted one by one."""

    def __init__(
        self, devices: Sequence[Device], taken: set[int], demand: Callable[[LiveJob], DeviceDemand]
    ) -> None:
        self._devices = devices
        self._taken = taken
        self._demand = demand

    def lack(self, job: LiveJob) -> Lack | None:
        """Why a job cannot be placed now; None if it can."""
        if not self._devices:
            return None
        placement = place(self._demand(job), self._devices, taken=self._taken)
        return placement if isinstance(placement, Lack) else None

    def wants_any(self, job: LiveJob) -> bool:
        """Whether a job asks for GPUs, and this machine has some."""
        return bool(self._devices and self._demand(job).count)

    def take(self, job: LiveJob) -> None:
        """Subtract what a job gets."""
        if not self._devices:
            return
        placement = place(self._demand(job), self._devices, taken=self._taken)
        if isinstance(placement, Placement):
            self._taken |= placement.used


NO_DEVICES = DeviceRoom((), set(), lambda job: demand_of(job.spec))
"""Room of a machine without GPUs, and of a cluster, whose scheduler places pods."""


class Placements:
    """GPUs by job and process, reserved from a job's start to the end of its last process.

    Without devices every process starts with the environment of the controller.
    """

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self._devices = tuple(devices)
        self._jobs: dict[str, _Job] = {}
        self._demands: dict[str, DeviceDemand] = {}
        self._held: Held = {}

    @property
    def devices(self) -> tuple[Device, ...]:
        """All GPUs of this machine."""
        return self._devices

    def see(self, devices: Sequence[Device]) -> None:
        """These are there now: processes whose GPUs have gone get others at their next start.

        None at all is a driver that does not answer, which changes nothing.
        """
        there = {device.visible for device in devices}
        gone = {d.index for d in self._devices if d.visible not in there}
        if not gone or not there:
            return
        self._devices = tuple(d for d in self._devices if d.visible in there)
        log.error("GPUs have gone", gpus=sorted(gone))
        for job in self._jobs.values():
            if job.placement is not None and job.placement.used & gone:
                roles = {r: n for r, n in job.placement.roles.items() if not gone & set(n)}
                job.placement = None
                self._place(job, roles)

    def refresh(self, jobs: Iterable[LiveJob], held: Held) -> None:
        """Reserve for jobs that have started, the oldest first, and forget those that are over.

        `held` is what processes have that are running or being stopped.
        """
        if not self._devices:
            return
        live = {job.job_id: job for job in jobs}
        started = [job for job in live.values() if job.state not in _WITHOUT_GPUS]
        self._held = held
        own = _used(held.values())  # the memory of these is in use by this installation
        self._devices = tuple(
            replace(d, used_bytes=0) if d.index in own else d for d in self._devices
        )
        kept = {job.job_id for job in started} | held.keys()
        self._jobs = {n: job for n, job in self._jobs.items() if n in kept}
        self._demands = {n: demand for n, demand in self._demands.items() if n in live}
        for job in sorted(started, key=lambda job: (-job.age_s, job.job_id)):
            known = self._jobs.setdefault(job.job_id, _Job(self.demand(job)))
            if known.placement is None:
                self._place(known, self._adopt(job.job_id, known))

    def demand(self, job: LiveJob) -> DeviceDemand:
        """The devices that a job asks for; the folder of its model is read once."""
        if job.job_id not in self._demands:
            self._demands[job.job_id] = demand_of(job.spec)
        return self._demands[job.job_id]

    def room(self) -> DeviceRoom:
        """The devices that are free now."""
        return DeviceRoom(self._devices, self._taken(), self.demand)

    def problem(self, job: LiveJob) -> str:
        """Why a queued job can never start on this machine; empty if it can."""
        if job.state is not JobState.QUEUED or not self._devices:
            return ""
        placement = place(self.demand(job), self._devices)
        return f"devices: {placement.text}" if isinstance(placement, Lack) else ""

    def waits_for(self, job_id: str) -> str:
        """The GPUs that a started job lacks, for people; empty: none."""
        job = self._jobs.get(job_id)
        return f"waits for GPUs: {job.lack}" if job is not None and job.lack else ""

    def placed(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """These single processes with their GPUs, without those that get none.

        What workers beyond a job's first ones had is free once they are neither wanted nor run.
        """
        processes = list(wanted)
        if not self._devices:
            return processes
        self._release({process.name for process in processes})
        return [process for process in map(self._with_devices, processes) if process is not None]

    def _with_devices(self, wanted: Wanted) -> Wanted | None:
        if not wanted.job_id:
            return replace(wanted, devices=())
        job = self._jobs.get(wanted.job_id)
        if job is None or job.placement is None:
            return None
        role = job.roles.get(wanted.name) or self._role(job, job.placement, wanted)
        if role is None:
            return None
        job.roles[wanted.name] = role
        devices = self._devices_at(job.placement.roles[role])
        share = None if role == TRAINER else memory_share(job.demand, job.placement, devices)
        return replace(wanted, devices=devices, memory_share=share)

    def _role(self, job: _Job, placement: Placement, wanted: Wanted) -> str | None:
        """A role that no other process of the job has; None: no GPU is free for one more."""
        if wanted.kind is WorkerKind.TRAINER:
            return TRAINER
        unused = placement.roles.keys() - job.roles.values() - {TRAINER}
        if unused:
            return min(unused, key=lambda role: (len(role), role))
        indices = more(job.demand, self._devices, taken=self._taken(but=job), own=placement)
        if indices is None:
            return None
        role = next(
            r for n in range(len(placement.roles)) if (r := worker(n)) not in placement.roles
        )
        job.placement = replace(placement, roles={**placement.roles, role: indices})
        return role

    def _release(self, wanted: set[str]) -> None:
        for job_id, job in self._jobs.items():
            kept = wanted | self._held.get(job_id, {}).keys()
            job.roles = {name: role for name, role in job.roles.items() if name in kept}
            if job.placement is not None:
                needed = {TRAINER, *map(worker, range(job.demand.replicas)), *job.roles.values()}
                roles = {r: n for r, n in job.placement.roles.items() if r in needed}
                job.placement = replace(job.placement, roles=roles)

    def _adopt(self, job_id: str, job: _Job) -> dict[str, Indices]:
        """Roles of processes that an earlier controller started."""
        held = dict(self._held.get(job_id, {}))
        known = {device.index for device in self._devices}
        trainer = held.pop(trainer_name(job_id), ())
        roles = {TRAINER: trainer} if trainer and known.issuperset(trainer) else {}
        for number, (name, indices) in enumerate(sorted(held.items())):
            if known.issuperset(indices):
                job.roles[name] = worker(number)
                roles[worker(number)] = indices
        return roles

    def _place(self, job: _Job, kept: Mapping[str, Indices]) -> None:
        placement = place(job.demand, self._devices, taken=self._taken(but=job), kept=kept)
        if isinstance(placement, Lack):
            job.lack = placement.text
            return
        job.placement, job.lack = placement, ""
        # A worker beyond the first ones may have lost its role with its GPUs.
        job.roles = {name: role for name, role in job.roles.items() if role in placement.roles}
        if placement.used:
            named = {role: listed(self._devices_at(n)) for role, n in placement.roles.items()}
            log.info("placed", colocated=placement.colocated, roles=named)

    def _taken(self, *, but: _Job | None = None) -> set[int]:
        others = [(n, job) for n, job in self._jobs.items() if job is not but]
        held = [self._held.get(n, {}) for n, _ in others]
        held += [roles for n, roles in self._held.items() if n not in self._jobs]
        placed = [job.placement.used for _, job in others if job.placement is not None]
        return _used(held).union(*placed)

    def _devices_at(self, indices: Indices) -> tuple[Device, ...]:
        return tuple(device for device in self._devices if device.index in indices)


def _used(held: Iterable[Mapping[str, Indices]]) -> set[int]:
    """All GPUs of these processes."""
    return {index for processes in held for indices in processes.values() for index in indices}
