"""What jobs and processes are doing, as their owners may see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from paceline.enums import JobState
from paceline.front.api.activity import Activity, JobActivity, ProcessActivity
from paceline.platform.transport.principal import ALL_TENANTS, Principal
from paceline.types import JobStatus
from paceline_experience.fleet.roster import Member, Query, Roster
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.jobs.metrics import JobMetricsCollector

MAX_JOBS, MAX_PROCESSES = 200, 1000
_WAIT = "wait:"
_LIVE = [state for state in JobState if not state.terminal]


class ActivityMonitor:
    """Snapshots of an installation; they ask the store for a page of jobs, and nothing else."""

    def __init__(
        self,
        *,
        jobs: JobStore,
        ledgers: Ledgers,
        roster: Roster,
        collector: JobMetricsCollector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._ledgers = ledgers
        self._roster = roster
        self._collector = collector
        self._clock = clock

    async def snapshot(self, who: Principal, *, tenant: str) -> Activity:
        """What `who` may see; `tenant`: only its jobs, if not empty."""
        wanted = who.narrowed(tenant)
        if wanted is None:
            return Activity(self._clock())
        page = await self._jobs.list_page(
            tenant=wanted, states=_LIVE, page_size=MAX_JOBS, page_token=""
        )
        jobs = tuple([await self._job(job.status.job_id, job.status) for job in page.jobs])
        mine = {job.status.job_id for job in jobs}
        sees_all = who.tenant == ALL_TENANTS
        processes = [
            _process(member, with_load=sees_all or bool(member.worker.job_id))
            for member in self._roster.members(Query())
            if not member.worker.job_id or member.worker.job_id in mine
        ]
        processes.sort(key=lambda each: (each.kind, each.worker_id))
        return Activity(
            clock_s=self._clock(),
            jobs=jobs,
            processes=tuple(processes[:MAX_PROCESSES]),
            more_jobs=bool(page.token),
            processes_left_out=max(0, len(processes) - MAX_PROCESSES),
        )

    async def _job(self, job_id: str, status: JobStatus) -> JobActivity:
        ledger = self._ledgers.peek(job_id)
        entry = self._ledgers.active.get(job_id)
        target = entry.spec.stop.steps if entry is not None and entry.spec.trains else 0
        held = self._collector.held(job_id)
        waits_s = self._collector.waits_s(job_id)
        if ledger is None:
            return JobActivity(status, target_steps=target, waits_s=waits_s, held=held)
        live = await ledger.live()
        return JobActivity(
            status=status,
            target_steps=target,
            waits_s=waits_s,
            reward=live.reward_mean,
            staleness=_mean(live.staleness_histogram),
            tokens=live.tokens_generated + live.eval_tokens,
            trained_tokens=live.trained_tokens,
            leased=live.counts.get("leased", 0),
            open_groups=live.open_groups,
            ready_groups=live.ready_groups,
            headroom_groups=live.headroom_groups,
            waiting=live.waiting,
            held=held,
        )


def _process(member: Member, *, with_load: bool) -> ProcessActivity:
    worker, usage = member.worker, member.usage
    return ProcessActivity(
        worker_id=worker.worker_id,
        kind=worker.kind,
        job_id=worker.job_id,
        active_version=worker.active_version,
        capacity=usage.get("capacity", 1.0),
        busy_s=usage.get("busy", 0.0),
        stalled_s=usage.get("stalled", 0.0),
        handling_s=usage.get("handling", 0.0),
        waits_s={n.removeprefix(_WAIT): s for n, s in usage.items() if n.startswith(_WAIT)},
        load=dict(worker.load) if with_load else {},
    )


def _mean(histogram: Mapping[str, int]) -> float:
    total = sum(histogram.values())
    return sum(int(age) * count for age, count in histogram.items()) / total if total else 0.0
