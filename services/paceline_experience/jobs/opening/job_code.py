"""What runs the plug-ins and the code of jobs, and reads their data."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.service import ExperienceOptions
from paceline.isolation.code.folders import CodeFolders
from paceline.isolation.code.function_process import MODULE as FUNCTIONS
from paceline.isolation.code.packages import Packages
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.world_process import MODULE as WORLDS
from paceline.platform.telemetry.metrics import Metrics
from paceline_experience.jobs.data import DataOfJobs
from paceline_experience.jobs.dry_run import TriesPlugins
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.own_functions import OwnFunctions
from paceline_experience.jobs.own_tasks import OwnTasks, sources_of
from paceline_experience.ledger.own.parts import OwnParts
from paceline_experience.ledger.sources import Sources
from paceline_experience.store.artifacts import ArtifactStore


@dataclass(frozen=True, slots=True)
class JobCode:
    """The plug-ins, code and data of the jobs whose ledgers this process opens."""

    dry_run: TriesPlugins
    own_tasks: OwnTasks
    own_functions: OwnFunctions
    data: DataOfJobs

    async def sources(self, job: JobParts) -> Sources:
        """The tasks of a job that was accepted, once its plug-ins have been tried again.

        Raises:
            InvalidError: its plug-ins are refused; `UntriedError`, `UnreadError`: it took too long.
            UnavailableError: this machine cannot try them now.
        """
        data = await self.data.again(job)
        await self.dry_run.check(job.spec, data)
        return await sources_of(job, self.own_tasks, data)

    async def functions(self, job_id: str, job: JobParts, sources: Sources) -> OwnParts:
        """The functions of a job's code, until `end`.

        Raises:
            InvalidError: its data have changed since it was submitted, or one cannot be imported.
            UnavailableError: this machine cannot contain the code.
        """
        await self.data.check_unchanged(job_id, sources.digests)
        return await self.own_functions.of(job_id, job)

    def end(self, job_id: str) -> None:
        """End the functions of a job."""
        self.own_functions.end(job_id)

    async def close(self) -> None:
        """End all processes but those of `dry_run`, and delete what was unpacked."""
        await self.own_functions.close()
        await self.own_tasks.close()
        await self.data.close()


def make_job_code(
    jobs: JobStore,
    artifacts: ArtifactStore,
    *,
    options: ExperienceOptions,
    dry_run: TriesPlugins,
    packages: Packages | None,
    metrics: Metrics,
) -> JobCode:
    """Make it for the jobs of a store; `packages` None: nothing that code requires is installed."""
    folders = CodeFolders(artifacts.copy, packages=packages)
    return JobCode(
        dry_run=dry_run,
        own_tasks=OwnTasks(
            sandbox=sandbox_for(WORLDS, lowest=options.sandbox_level),
            folders=folders,
            store=artifacts,
            timeout_s=options.plugins_s,
            memory_bytes=options.code_memory_bytes,
        ),
        own_functions=OwnFunctions(
            sandbox=sandbox_for(FUNCTIONS, lowest=options.sandbox_level),
            folder_of=folders.folder,
            store=artifacts,
            memory_bytes=options.code_memory_bytes,
            max_processes=options.max_code_processes,
            call_s=options.code_call_s,
            check_s=options.plugins_s,
            metrics=metrics,
        ),
        data=DataOfJobs(folders=folders, jobs=jobs, options=options),
    )
