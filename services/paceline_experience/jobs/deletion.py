"""Deletes jobs: nothing is left but the audit log.

A job to be deleted is marked first, so that a deletion which a crash or a disk has interrupted goes
on with the next sweep. All steps may be repeated. Last goes what makes the job known at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from paceline.enums import WorkerKind
from paceline.errors import NotFoundError, StateError
from paceline.platform.telemetry.logs import Log
from paceline.types import Job
from paceline_experience.fleet.roster import Query, Roster
from paceline_experience.jobs.job_files import JobFiles
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.jobs.registry import MARKS, Mark
from paceline_experience.jobs.service import JobService
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.store.keys import all_keys
from paceline_experience.store.store import Store

SETTLE_S = 3.0  # workers that are not in the roster yet have so long to join
WAIT_S = 1.0  # for a deletion, which then goes on in the background
_AT_A_TIME = 4  # jobs whose files are removed: disks that hang hold threads
_TRACKERS_S = 60.0  # how long trackers may take to write the end of a job
_UNFINISHED_S = 60.0  # how long a job without a record waits for its request to come again
log = Log("deletion")


class Deletion:
    """Deletes jobs that are over, on request and once their time to live has passed."""

    def __init__(
        self,
        *,
        store: Store,
        jobs: JobStore,
        ledgers: Ledgers,
        artifacts: ArtifactStore,
        job_service: JobService,
        roster: Roster,
        files: JobFiles,
        settle_s: float = SETTLE_S,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._ledgers = ledgers
        self._artifacts = artifacts
        self._job_service = job_service
        self._roster = roster
        self._files = files
        self._settle_s = settle_s
        self._wait_s = wait_s
        self._clock = clock
        self._idle_since: dict[str, float] = {}  # since when no worker of it has been seen
        self._over_since: dict[str, float] = {}
        self._cleaned: dict[str, float] = {}  # when its files were first removed
        self._unfinished_since: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._slow: set[str] = set()  # nobody waits for these any more
        self._threads = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="deletion")

    async def delete(self, job_id: str, *, force: bool) -> bool:
        """Begin to delete a job, or go on; returns whether nothing of it is left.

        Raises:
            NotFoundError: there is no such job, or not any more.
            StateError: it is not over, and `force` is not set.
            UnavailableError: something cannot be deleted now; it is tried again without a call.
        """
        if await self._jobs.registry.mark_of(job_id) is None:
            job = await self._jobs.get(job_id)
            if not job.status.state.terminal and not force:
                state = job.status.state
                raise StateError(
                    f"job {job_id} is {state}: cancel it first, or delete it with force"
                )
            await self._mark(job)
            log.info("to be deleted", job=job_id)
        return await self._advance(job_id)

    async def abandon(self, job_ids: Iterable[str]) -> None:
        """Delete what a crash or an error has left of jobs that nobody knows yet."""
        for job_id in job_ids:
            with self._ledgers.isolate("cannot delete yet", job_id):
                tenant = await self._jobs.tenant_of(job_id)
                if await self._jobs.registration.abandon(tenant, job_id):
                    await self._advance(job_id)

    async def _abandon_unfinished(self) -> None:
        """Those whose request was given up between registration and record."""
        now = self._clock()
        found = await self._jobs.registration.unfinished()
        self._unfinished_since = {
            job_id: self._unfinished_since.get(job_id, now) for job_id in found
        }
        since = self._unfinished_since.items()
        await self.abandon([job_id for job_id, at in since if now - at >= _UNFINISHED_S])

    async def sweep(self) -> None:
        """Go on with all deletions, and begin those of jobs whose time to live has passed."""
        for job_id in await self._jobs.registry.expired():
            with self._ledgers.isolate("cannot delete yet", job_id):
                if await self._jobs.registry.mark_of(job_id) is None:
                    await self._mark(await self._jobs.get(job_id))
                    log.info("its time to live has passed", job=job_id)
        await self._jobs.registry.forget_requests()
        await self._abandon_unfinished()
        for job_id in await self._jobs.registry.marked():
            if job_id not in self._running:
                with self._ledgers.isolate("cannot delete yet", job_id):
                    await self._advance(job_id)

    async def close(self) -> None:
        """Stop deleting; the next process goes on."""
        tasks = [*self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _mark(self, job: Job) -> None:
        mark = Mark(
            tenant=job.status.tenant,
            artifacts=tuple(sorted(set(job.artifacts.values()))),
            uploads=tuple(sorted(await self._jobs.registry.uploads_of(job.status.job_id))),
            tracked=bool(job.status.tracking),
        )
        await self._jobs.registry.mark(job.status.job_id, mark)

    async def _advance(self, job_id: str) -> bool:
        """Go on with a deletion; returns whether nothing is left after `wait_s`."""
        task = self._running.get(job_id)
        if task is None:
            task = asyncio.create_task(self._go_on(job_id), name=f"deletion of {job_id}")
            self._running[job_id] = task
            task.add_done_callback(partial(self._stopped, job_id))
        await asyncio.wait({task}, timeout=self._wait_s)
        if not task.done():
            self._slow.add(job_id)
            return False
        return task.result()

    def _stopped(self, job_id: str, task: asyncio.Task[bool]) -> None:
        del self._running[job_id]
        error = None if task.cancelled() else task.exception()
        if error is not None and job_id in self._slow:
            log.warning("cannot delete yet", job=job_id, error=error)
        self._slow.discard(job_id)

    async def _go_on(self, job_id: str) -> bool:
        mark = await self._jobs.registry.mark_of(job_id)
        if mark is None:
            return True
        if not await self._is_still(job_id):
            return False
        return await self._remove(job_id, mark)

    async def _is_still(self, job_id: str) -> bool:
        """Whether the job is over, and none of its workers can write any more."""
        try:
            status = (await self._jobs.get(job_id)).status
        except NotFoundError:
            return True  # its record has gone before a crash, and so have its workers
        if not status.state.terminal:
            self._idle_since.pop(job_id, None)
            with suppress(StateError):
                await self._job_service.cancel(job_id, reason="it is to be deleted")
            return False
        await self._jobs.registry.note_end(status)  # its webhook hears of it in any case
        now = self._clock()
        workers = self._roster.workers(Query(job_id=job_id))
        if any(each.job_id == job_id for each in workers):
            self._idle_since.pop(job_id, None)
            return False
        over_s = now - self._over_since.setdefault(job_id, now)
        tracked = any(not each.state.terminal for each in status.tracking)
        follows = any(each.kind is WorkerKind.TRACKING for each in workers)
        if tracked and follows and over_s < _TRACKERS_S:
            return False
        return now - self._idle_since.setdefault(job_id, now) >= self._settle_s

    async def _remove(self, job_id: str, mark: Mark) -> bool:
        if mark.submitted:
            await self._jobs.registry.bury(job_id)
        await self._job_service.forget(job_id)
        keys = all_keys(mark.tenant, job_id)
        await self._store.command("UNLINK", *keys)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._files.remove, job_id)
        await self._discard(job_id, mark)
        now = self._clock()
        if mark.tracked and now - self._cleaned.setdefault(job_id, now) < self._settle_s:
            return False  # a tracker may be about to write a last file
        await self._store.command("UNLINK", *keys)
        await self._jobs.registry.remove(job_id, ("HDEL", MARKS, job_id))
        self._jobs.forget(job_id)
        for each in (self._idle_since, self._over_since, self._cleaned):
            each.pop(job_id, None)
        log.info("deleted", job=job_id)
        return True

    async def _discard(self, job_id: str, mark: Mark) -> None:
        """Delete model files that no other job has; its uploads then count as unused.

        Raises:
            UnavailableError: a job that is being submitted may need them.
        """
        before = self._artifacts.submissions
        used = await self._jobs.registry.used_digests(but=job_id)
        async with self._artifacts.undisturbed(since=before):
            await self._artifacts.discard(set(mark.artifacts) - used)
            for digest in set(mark.uploads) - used:
                await self._artifacts.release_code(mark.tenant, digest)
