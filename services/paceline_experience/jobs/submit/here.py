"""What experience checks of a job, on the machine with its files: no store, nothing installed.

See `paceline.front.local.checks`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from paceline.config import JobSpec
from paceline.config.named import has_own_generation
from paceline.config.service import ExperienceOptions
from paceline.data import JobData, UnreadError
from paceline.data.job_data import EVERYWHERE
from paceline.errors import UnavailableError
from paceline.front.local.checks import Findings
from paceline.isolation.code import archive
from paceline.isolation.code.folders import CodeFolders
from paceline.isolation.code.function_process import MODULE as FUNCTIONS
from paceline.isolation.code.requirements import REQUIREMENTS
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.world_process import MODULE as WORLDS
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.plugins.allowed import AllowedTargets
from paceline_experience.jobs.dry_run import UntriedError
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.own_functions import OwnFunctions
from paceline_experience.jobs.own_tasks import OwnTasks
from paceline_experience.jobs.submit.checks import NothingKept, SubmissionChecks
from paceline_experience.ledger.sources import try_plugins

CALL_S = 10.0  # for a call of a job's own code, its tasks, or its rows
_OPTIONS = ExperienceOptions()


class Uploaded:
    """Files of a job where they lie, as if they had been uploaded."""

    def __init__(self, spec: JobSpec) -> None:
        """Packs the code; raises as `pack`."""
        self.spec = spec
        self._code: BinaryIO | None = None
        self._indexes = tempfile.TemporaryDirectory(prefix="paceline-checks-")
        self.names: list[str] = []
        if spec.code is not None and spec.code.path:
            self._code = tempfile.TemporaryFile()  # noqa: SIM115  until `close`
            digest = archive.pack(Path(spec.code.path), self._code)
            self.names = archive.check(self._code)
            self.spec = spec.model_copy(
                update={"code": spec.code.model_copy(update={"digest": digest})}
            )

    async def names_of(self, tenant: str, field: str, digest: str) -> list[str]:
        """The files of the code; of data whether there are any."""
        del tenant
        if field == "data":
            if self.spec.data is not None and self.spec.data.path:
                archive.data_files(Path(self.spec.data.path))
            return []
        if self._code is None:
            raise UnavailableError(f"code.digest: what was uploaded as {digest} is not here")
        return self.names

    def close(self) -> None:
        """Forget the archive, and indexes of rows."""
        self._indexes.cleanup()
        if self._code is not None:
            self._code.close()

    async def copy(self, digest: str, into: BinaryIO) -> None:
        """The archive of the code."""
        del digest
        assert self._code is not None
        self._code.seek(0)
        await asyncio.to_thread(shutil.copyfileobj, self._code, into)

    async def of(self, job: JobParts) -> JobData:
        """Rows are read where plug-ins are tried."""
        path = job.spec.data.path if job.spec.data is not None else ""
        cache = self._indexes.name
        return JobData(uploaded=path, allowed=EVERYWHERE, cache=cache, timeout_s=CALL_S)


class TriedHere:
    """Tries installed plug-ins in this process, which is there for nothing else."""

    async def check(self, spec: JobSpec, data: JobData) -> None:
        """Raises as `try_plugins`."""
        await asyncio.to_thread(try_plugins, spec, data)


class Sandboxes:
    """Warm processes for sealed ones, of which several jobs may make use."""

    def __init__(self) -> None:
        self.functions: Sandbox = sandbox_for(FUNCTIONS, lowest=_OPTIONS.sandbox_level)
        self.worlds: Sandbox = sandbox_for(WORLDS, lowest=_OPTIONS.sandbox_level)

    async def close(self) -> None:
        """End them."""
        await self.functions.close()
        await self.worlds.close()


async def found_in(spec: JobSpec, sandboxes: Sandboxes) -> Findings:
    """What is wrong with a job, and what could not be checked.

    Raises:
        InvalidError: as `SubmissionChecks.check_parts`.
        UnavailableError: its code cannot be run here.
    """
    uploaded = await asyncio.to_thread(Uploaded, spec)
    folders = CodeFolders(uploaded.copy, packages=None)
    lacks_packages = REQUIREMENTS in uploaded.names
    checks = SubmissionChecks(
        names_of=uploaded.names_of,
        dry_run=TriedHere(),
        own_tasks=_own_tasks(sandboxes, folders),
        own_functions=_own_functions(sandboxes, folders, lacks_packages=lacks_packages),
        data=uploaded,
    )
    try:
        job = JobParts(uploaded.spec)
        data, untried = await checks.check_parts(job)
        if job.lists_own_tasks and lacks_packages:
            untried.append(f"tasks: are listed at submit, once {REQUIREMENTS} is installed")
        elif job.lists_own_tasks or has_own_generation(job.spec):
            await checks.check_tasks(job, data)
        return Findings(unchecked=tuple(untried))
    except (UntriedError, UnreadError) as error:  # at submit there is more time
        return Findings(unchecked=(error.message,))
    finally:
        await folders.close()
        uploaded.close()


def _own_functions(
    sandboxes: Sandboxes, folders: CodeFolders, *, lacks_packages: bool
) -> OwnFunctions:
    return OwnFunctions(
        sandbox=sandboxes.functions,
        folder_of=folders.folder,
        store=NothingKept(),
        memory_bytes=_OPTIONS.code_memory_bytes,
        max_processes=1,
        call_s=CALL_S,
        check_s=CALL_S,
        lacks_packages=lacks_packages,
    )


def _own_tasks(sandboxes: Sandboxes, folders: CodeFolders) -> OwnTasks:
    return OwnTasks(
        sandbox=sandboxes.worlds,
        folders=folders,
        store=NothingKept(),
        timeout_s=CALL_S,
        memory_bytes=_OPTIONS.code_memory_bytes,
    )


async def check(spec: JobSpec, allowed: AllowedTargets) -> Findings:
    """As `found_in`, with sandboxes of its own."""
    del allowed  # what the ledger calls is installed, or of the job's own code
    sandboxes = Sandboxes()
    try:
        return await found_in(spec, sandboxes)
    finally:
        await sandboxes.close()
