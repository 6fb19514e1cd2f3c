"""Starts queued jobs as capacity allows, and sets the reason of those that wait."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from paceline.config.service import ControllerOptions
from paceline.enums import JobState
from paceline.errors import PacelineError
from paceline.front.api.tenants import Tenant
from paceline.front.local.devices.placement import Indices
from paceline.platform.telemetry.logs import Log
from paceline.platform.text import clipped
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.placements import Placements
from paceline_controller.jobs.plan import (
    SERVED,
    LiveJob,
    fixed_rollouts,
    pools_of,
    problem,
    rollout_name,
)
from paceline_controller.jobs.queue import Queue, schedule

# Reasons set in one pass: a long queue must not delay everything else.
MAX_NOTES = 20
log = Log("queue")


class Tenancy(Protocol):
    """Knows the quotas of tenants and stores the states of jobs."""

    async def tenants(self) -> Mapping[str, Tenant]:
        """Quota and usage of each tenant."""
        ...

    async def set_state(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        """Move a job to another state."""
        ...


class JobStarter:
    """Stateless: the queue consists of the states of the jobs, so the next leader resumes it."""

    def __init__(
        self,
        *,
        ledger: Tenancy,
        options: ControllerOptions,
        reason_bytes: int,
        placements: Placements,
    ) -> None:
        self._ledger = ledger
        self._placements = placements
        self._reason_bytes = reason_bytes
        self._options = options
        self.tenants: Mapping[str, Tenant] = {}

    def problem(self, job: LiveJob) -> str:
        """Why the job cannot run in this installation; empty if it can."""
        return problem(job, self._options) or self._placements.problem(job)

    async def once(
        self,
        jobs: Mapping[str, LiveJob],
        sizes: Mapping[str, int],
        observed: Collection[Observed],
    ) -> tuple[dict[str, LiveJob], Queue]:
        """Start what fits; returns the jobs with their new states, and the queue.

        `sizes` are replicas that are asked for by workload, `observed` is what runs.
        """
        held = devices_held(observed)
        self._placements.refresh(jobs.values(), held)
        after, queue = await self._start(jobs, sizes, running_replicas(observed))
        if queue.starts:
            self._placements.refresh(after.values(), held)
        return after, queue

    async def _start(
        self, jobs: Mapping[str, LiveJob], sizes: Mapping[str, int], running: Mapping[str, int]
    ) -> tuple[dict[str, LiveJob], Queue]:
        after = dict(jobs)
        if not any(_asks(job) for job in jobs.values()):
            return after, Queue()
        try:
            self.tenants = await self._ledger.tenants()
        except PacelineError as error:
            log.warning("quotas are not known; no job starts", error=error)
            return after, Queue()
        held = {job_id: held_by(job, sizes, running, self._options) for job_id, job in jobs.items()}
        room = self._placements.room()
        queue = schedule(jobs.values(), held, self.tenants, self._options, room)
        for job_id in queue.starts:
            if await self._set_state(job_id, JobState.STARTING):
                after[job_id] = replace(jobs[job_id], state=JobState.STARTING, reason="")
        waits = {n: clipped(why, self._reason_bytes) for n, why in queue.waits.items()}
        changed = [(n, why) for n, why in waits.items() if jobs[n].reason != why]
        for job_id, why in changed[:MAX_NOTES]:
            await self._set_state(job_id, JobState.QUEUED, reason=why)
        return after, queue

    async def _set_state(self, job_id: str, state: JobState, *, reason: str = "") -> bool:
        try:
            await self._ledger.set_state(job_id, state, reason=reason)
        except PacelineError as error:
            log.warning("cannot move the job on", job=job_id, state=state, error=error)
            return False
        log.info("queue", job=job_id, state=state, reason=reason)
        return True


def _asks(job: LiveJob) -> bool:
    """Whether a quota may decide on anything of it: its start, or its size."""
    return job.state is JobState.QUEUED or job.spec.rollout.scaling is not None


def held_by(
    job: LiveJob,
    sizes: Mapping[str, int],
    running: Mapping[str, int],
    options: ControllerOptions,
) -> dict[str, int]:
    """Rollout workers of a job by pool: the wanted or the running ones, whichever are more."""
    pools = pools_of(job.spec, options)
    names = {pool: rollout_name(job.job_id, pool) for pool in pools}
    held = {pool: running.get(name, 0) for pool, name in names.items()}
    if job.state in SERVED:
        if job.spec.rollout.scaling is None:
            held[pools[0]] = max(held[pools[0]], fixed_rollouts(job.spec))
        else:
            held = {pool: max(n, sizes.get(names[pool], 0)) for pool, n in held.items()}
    return held


def devices_held(observed: Iterable[Observed]) -> dict[str, dict[str, Indices]]:
    """GPUs of what runs, or has died and was not stopped, by job and process."""
    held: dict[str, dict[str, Indices]] = {}
    for process in observed:
        if process.devices:
            held.setdefault(process.job_id, {})[process.name] = process.devices
    return held


def running_replicas(observed: Iterable[Observed]) -> dict[str, int]:
    """Replicas by workload, where each of them may have a name of its own, `<workload>-<i>`."""
    replicas: dict[str, int] = {}
    for process in observed:
        workload, _, index = process.name.rpartition("-")
        replicas[process.name] = process.replicas
        if index.isdigit():
            replicas[workload] = replicas.get(workload, 0) + 1
    return replicas
