"""The checks of a job's uploads, plug-ins, data and code: cheap ones first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.data import JobData
from paceline.errors import ConfigError
from paceline.isolation.code.modules import missing_modules
from paceline.isolation.code.requirements import REQUIREMENTS
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.own_functions import OwnFunctions
from paceline_experience.jobs.own_tasks import OwnTasks, sources_of
from paceline_experience.ledger.sources import Sources, check_plugins

if TYPE_CHECKING:
    from paceline_experience.jobs.data import ReadsData
    from paceline_experience.jobs.dry_run import TriesPlugins

NamesOf = Callable[[str, str, str], Awaitable[list[str]]]


class SubmissionChecks:
    """Reads, imports and calls what a job brings, before it is accepted."""

    def __init__(
        self,
        *,
        names_of: NamesOf,
        dry_run: TriesPlugins,
        own_tasks: OwnTasks,
        own_functions: OwnFunctions,
        data: ReadsData,
    ) -> None:
        """`names_of` returns the files of an upload, given a tenant, the section and its digest."""
        self._names_of = names_of
        self._dry_run = dry_run
        self._own_tasks = own_tasks
        self._own_functions = own_functions
        self._data = data

    async def check_parts(self, job: JobParts) -> tuple[JobData, list[str]]:
        """Check everything but what needs the tasks of the job's own code.

        Returns what its tasks may read, and why rewards of its code could not be tried.

        Raises:
            InvalidError: something is wrong; `UntriedError`, `UnreadError`: it took too long.
            UnavailableError: this machine cannot check it now.
        """
        if job.data is not None:
            await self._names_of(job.tenant, "data", job.data)
        if job.code is not None:
            names = await self._names_of(job.tenant, "code", job.code)
            _check_modules(job.modules, names)
            if REQUIREMENTS in names:
                await self._own_tasks.prepare(job.code, job.tenant)
        # The child would find the same problems, but a child that has refused a job is replaced.
        await asyncio.to_thread(check_plugins, job.spec)
        untried = await self._own_functions.check(job)
        data = await self._data.of(job)
        await self._dry_run.check(job.spec, data)
        return data, untried

    async def check_tasks(self, job: JobParts, data: JobData) -> Sources:
        """The tasks of a job, from which a sampler of its code has drawn.

        Raises as `check_parts`.
        """
        sources = await sources_of(job, self._own_tasks, data)
        await self._own_functions.check_generation(job, len(sources.train))
        return sources


def _check_modules(targets: Iterable[tuple[str, str]], names: Sequence[str]) -> None:
    """Raise `ConfigError` if code lacks a module of these targets, or hides one of Python."""
    if wrong := list(missing_modules(targets, names)):
        raise ConfigError("; ".join(wrong))


class NothingKept:
    """Stands for a store where nothing outlives the check."""

    async def needs(self, name: str) -> Mapping[str, Sequence[str]] | None:
        """None."""
        del name

    async def put_needs(self, name: str, needs: Mapping[str, Sequence[str]]) -> None:
        """Nothing."""
        del name, needs

    async def tasks(self, name: str) -> bytes | None:
        """None."""
        del name

    async def put_tasks(self, name: str, tasks: bytes) -> None:
        """Nothing."""
        del name, tasks
