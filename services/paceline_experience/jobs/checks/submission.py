"""The checks of a job's code, plug-ins and data, in the order in which a submission makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from paceline.code.modules import missing_modules
from paceline.code.requirements import REQUIREMENTS
from paceline.config import JobSpec
from paceline.data import JobData
from paceline.errors import ConfigError
from paceline_experience.jobs.own_functions import OwnFunctions
from paceline_experience.jobs.own_tasks import OwnTasks, sources_of
from paceline_experience.ledger.sources import Sources, check_plugins

NamesOf = Callable[[str, str, str], Awaitable[list[str]]]


class TriesPlugins(Protocol):
    """Builds and calls the installed plug-ins that the ledger of a job will call."""

    async def check(self, spec: JobSpec, data: JobData | None = None) -> None:
        """See `paceline_experience.jobs.dry_run.DryRun.check`."""
        ...


class ReadsData(Protocol):
    """Reads the rows of a job."""

    async def of(self, spec: JobSpec) -> JobData:
        """See `paceline_experience.jobs.data.DataOfJobs.of`."""
        ...


class SubmissionChecks:
    """What is wrong with a job, as far as its code, plug-ins and data tell: cheap checks first."""

    def __init__(
        self,
        *,
        names_of: NamesOf,
        dry_run: TriesPlugins,
        own_tasks: OwnTasks | None = None,
        own_functions: OwnFunctions | None = None,
        data: ReadsData | None = None,
    ) -> None:
        """`names_of` returns the files of an upload, given a tenant, the section and its digest."""
        self._names_of = names_of
        self._dry_run = dry_run
        self._own_tasks = own_tasks
        self._own_functions = own_functions
        self._data = data

    async def check(self, spec: JobSpec) -> Sources:
        """The tasks of a job that may be accepted.

        Raises:
            InvalidError: something is wrong; `UntriedError`, `UnreadError`: it took too long.
            UnavailableError: this machine cannot check it now.
        """
        data, _ = await self.check_parts(spec)
        return await self.check_tasks(spec, data)

    async def check_tasks(self, spec: JobSpec, data: JobData | None) -> Sources:
        """The tasks of a job, from which a sampler of its code has drawn; raises as `check`."""
        sources = await sources_of(spec, self._own_tasks, data)
        if self._own_functions is not None:
            await self._own_functions.check_generation(spec, len(sources.train))
        return sources

    async def check_parts(self, spec: JobSpec) -> tuple[JobData | None, list[str]]:
        """As `check`, without tasks of the job's own code and what draws them.

        Returns what its tasks may read, and why rewards of its code could not be tried.
        """
        await self._check_uploads(spec)
        # The child would find the same problems, but a child that has refused a job is replaced.
        await asyncio.to_thread(check_plugins, spec)
        untried = [] if self._own_functions is None else await self._own_functions.check(spec)
        data = await self._data.of(spec) if self._data is not None else None
        await self._dry_run.check(spec, data)
        return data, untried

    async def _check_uploads(self, spec: JobSpec) -> None:
        if spec.data is not None:
            await self._names_of(spec.tenant, "data", spec.data.digest)
        if spec.code is None:
            return
        names = await self._names_of(spec.tenant, "code", spec.code.digest)
        if wrong := list(missing_modules(spec, names)):
            raise ConfigError("; ".join(wrong))
        if REQUIREMENTS in names and self._own_tasks is not None:
            await self._own_tasks.prepare(spec.code.digest, spec.tenant)


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
