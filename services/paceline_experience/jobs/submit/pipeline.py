"""The way of a submitted job: what happens to it in which order, and which check refuses what.

| step | needs | refuses with |
|---|---|---|
| `JobStore.find` | tenant, request id | `DeletedError`: the job of this request was deleted |
| `Forking.resolved` | spec, job of the request | `ConfigError`: there is no such checkpoint |
| `JobStore.check_quota` | tenant | `QuotaError`: as many live jobs as allowed |
| `Quotas.check`, `check_evals` | text, files, evaluations | `LimitError`: too large |
| `Uploads.names_of` | tenant, digests | `ConfigError`: not uploaded |
| `missing_modules` | functions of the code, its files | `ConfigError`: not among the files |
| `OwnTasks.prepare` | code | `InvalidError`, `QuotaError`: its packages cannot be installed |
| `check_plugins` | spec | `InvalidError`: not installed, wrong options, unmet needs |
| `OwnFunctions.check` | code, plug-ins in it | `InvalidError`: not imported, wrong answers |
| `DataOfJobs.of` | upload, options of `dataset` | `InvalidError`: wrong or missing rows |
| `DryRun.check` | spec, data | `InvalidError`: an installed plug-in fails when it is called |
| `sources_of` | tasks, code, data | `InvalidError`: there are no tasks |
| `OwnFunctions.check_generation` | code, number of tasks | `InvalidError`: draws no batch |
| `Forking.copy` | plan of the fork | `StateError`: the checkpoint is gone |
| `JobStore.create` | text, plug-ins, trackers | `UnlistedError`, `ConflictError`, `QuotaError` |

Then the job exists, and its ledger is opened. Steps of `SubmissionChecks` are also made by
`jobs.submit.here`, on the machine of a user.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from paceline.errors import FencedError
from paceline.platform.telemetry.logs import Log
from paceline.types import Job
from paceline_experience.jobs.forks.forking import Forking
from paceline_experience.jobs.forks.plan import fork_plan
from paceline_experience.jobs.history import History
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers, OverError
from paceline_experience.jobs.opening.job_code import JobCode
from paceline_experience.jobs.record import Value
from paceline_experience.jobs.registration import JobRequest
from paceline_experience.jobs.submit.checks import NamesOf, SubmissionChecks
from paceline_experience.jobs.submit.in_flight import InFlight
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.tenancy.quotas import Quotas

log = Log("jobs")


def checks_of(code: JobCode, names_of: NamesOf) -> SubmissionChecks:
    """The checks of jobs that are submitted; `names_of` as `SubmissionChecks` takes it."""
    return SubmissionChecks(
        names_of=names_of,
        dry_run=code.dry_run,
        own_tasks=code.own_tasks,
        own_functions=code.own_functions,
        data=code.data,
    )


class JobSubmitter:
    """Makes jobs of specs that pass all checks."""

    def __init__(
        self,
        *,
        jobs: JobStore,
        artifacts: ArtifactStore,
        history: History,
        ledgers: Ledgers,
        quotas: Quotas,
        forking: Forking,
        checks: SubmissionChecks,
        in_flight: InFlight,
    ) -> None:
        self._jobs = jobs
        self._artifacts = artifacts
        self._history = history
        self._ledgers = ledgers
        self._quotas = quotas
        self._forking = forking
        self._checks = checks
        self._in_flight = in_flight

    async def submit(self, job: JobParts, *, request_id: str, files: Mapping[str, bytes]) -> Job:
        """Create a job, or return the one that the same request created before.

        Raises:
            InvalidError, UnavailableError, QuotaError, LimitError: see the module.
            ConflictError: the request has created a job from another spec.
            DeletedError: it has created a job that was deleted.
            PendingError: its checkpoint is being copied, which goes on; repeat the request.
        """
        if not job.parent_id:
            self._in_flight.check(job.tenant, request_id, job.text)
            return await self._submit(job, request_id, files)
        request_id = request_id or uuid.uuid4().hex
        make = partial(self._submit, job, request_id, files)
        return await self._in_flight.share(job.tenant, request_id, job.text, make)

    async def _submit(self, job: JobParts, request_id: str, files: Mapping[str, bytes]) -> Job:
        existing = await self._jobs.find(job.tenant, request_id)
        job = await self._forking.resolved(job, existing)
        max_live = self._quotas.of(job.tenant).submitted
        create = partial(self._jobs.create, job, request_id=request_id, max_live=max_live)
        uploads = [digest for digest in (job.code, job.data) if digest is not None]
        if existing is not None:
            created = await create(artifacts=existing.artifacts)
            await self._keep(created, uploads)
            await self._ledgers.take(created.status.job_id)  # the first attempt may have failed
            return created
        await self._jobs.check_quota(job.tenant, max_live)
        self._quotas.check(job.tenant, "spec_bytes", len(job.text.encode()))
        self._quotas.check(job.tenant, "model_files_bytes", sum(map(len, files.values())))
        self._quotas.check_evals(job.evals)
        data, _ = await self._checks.check_parts(job)
        sources = await self._checks.check_tasks(job, data)
        prepared: Mapping[str, Value] = {}
        if (plan := fork_plan(job.spec)) is not None:
            request = JobRequest(job.name, job.tenant, request_id, max_live)
            copy = partial(self._forking.copy, plan)
            prepared = await self._jobs.registration.prepare(request, copy)
        with self._ledgers.looked_for():
            async with self._artifacts.submitting():
                artifacts = await self._artifacts.put(files)
                created = await create(artifacts=artifacts, prepared=prepared)
                await self._keep(created, uploads)
            if not created.status.state.terminal:
                with suppress(OverError, FencedError):  # FencedError: another replica was faster
                    await self._ledgers.activate(created, sources)
        return created

    async def _keep(self, created: Job, uploads: Sequence[str]) -> None:
        """Keep what was uploaded for a job that exists, and make its folder."""
        status = created.status
        for digest in uploads:
            await self._artifacts.keep_code(status.tenant, digest)
        await asyncio.to_thread(self._history.make_folder, status.job_id)
        log.info("submitted", job=status.job_id, tenant=status.tenant)
