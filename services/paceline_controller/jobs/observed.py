"""Workloads as a platform reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Observed:
    """A workload started by this controller or a previous one."""

    name: str
    job_id: str
    alive: bool
    outdated: bool = False  # runs with old settings: to be replaced
    replicas: int = 1  # requested
    ready: int = 0  # replicas that pass their health check
    pending: bool = False  # the platform is still working on starting it
    devices: tuple[int, ...] = ()  # indices of its GPUs, on one machine
