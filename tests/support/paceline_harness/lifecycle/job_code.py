"""Parts of the experience service, with everything that they need, as the service makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.config import JobSpec
from paceline.config.service import ExperienceOptions
from paceline.data import JobData
from paceline.data.errors import raise_answer
from paceline.isolation.code.folders import CodeFolders
from paceline.isolation.code.function_process import MODULE as FUNCTIONS
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.world_process import MODULE as WORLDS
from paceline_experience.jobs.data import DataOfJobs
from paceline_experience.jobs.dry_run import TriesPlugins, request_of
from paceline_experience.jobs.dry_run_child import attempt
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.opening.job_code import JobCode
from paceline_experience.jobs.own_functions import OwnFunctions
from paceline_experience.jobs.own_tasks import OwnTasks
from paceline_experience.store.artifacts import ArtifactStore
from paceline_harness.patience import PATIENCE_S

_MEMORY_BYTES = 2 << 30


class TriedHere:
    """Tries plug-ins in this process, as a child would, which takes a second to start."""

    async def check(self, spec: JobSpec, data: JobData) -> None:
        """Raises as `DryRun.check`."""
        raise_answer(await asyncio.to_thread(attempt, request_of(spec, data)))


class NotTried:
    """Tries nothing: for jobs whose plug-ins are known to work."""

    async def check(self, spec: JobSpec, data: JobData) -> None:
        """Nothing."""
        del spec, data


def job_code(
    jobs: JobStore,
    artifacts: ArtifactStore,
    *,
    dry_run: TriesPlugins,
    data_folders: Sequence[str] = (),
    wait_again_s: float = PATIENCE_S,
) -> JobCode:
    """What runs code and reads data of the jobs in a store; end it with `close_code`.

    `wait_again_s`: for rows of a job that was accepted.
    """
    folders = CodeFolders(artifacts.copy, packages=None)
    return JobCode(
        dry_run=dry_run,
        own_tasks=OwnTasks(
            sandbox=sandbox_for(WORLDS),
            folders=folders,
            store=artifacts,
            timeout_s=PATIENCE_S,
            memory_bytes=_MEMORY_BYTES,
        ),
        own_functions=OwnFunctions(
            sandbox=sandbox_for(FUNCTIONS),
            folder_of=folders.folder,
            store=artifacts,
            memory_bytes=_MEMORY_BYTES,
            max_processes=4,
            call_s=PATIENCE_S,
            check_s=PATIENCE_S,
        ),
        data=DataOfJobs(
            folders=folders,
            jobs=jobs,
            options=ExperienceOptions(data_folders=tuple(data_folders)),
            wait_again_s=wait_again_s,
        ),
    )


async def close_code(code: JobCode) -> None:
    """End what `job_code` has made."""
    await code.own_functions.close()
    await code.own_tasks.close()
    await code.data.close()
