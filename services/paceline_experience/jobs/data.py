"""Data of jobs in this service: unpacked, read once before plug-ins are tried, and known again."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping

from paceline.code.folders import CodeFolders
from paceline.config import JobSpec
from paceline.config.service import ExperienceOptions
from paceline.data import JobData, MissingDataError
from paceline.digest import digest_of
from paceline.environments.dataset.options import DatasetOptions
from paceline.errors import InvalidError, UnavailableError
from paceline.fair_queue import FairQueue, QueueOwner
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.ledger.sources import options_field

_AT_A_TIME, _OF_TENANT = 2, 1  # jobs whose rows are read
_WAIT_S = 20.0  # for rows that are being read; clients wait for 30 s
_WAIT_AGAIN_S = 5.0  # while other jobs are to be opened
_DATASET = "dataset"
_DIGESTS = "data_digests"


class DataOfJobs:
    """What the jobs of this service may read."""

    def __init__(self, *, folders: CodeFolders, jobs: JobStore, options: ExperienceOptions) -> None:
        self._folders = folders
        self._jobs = jobs
        self._options = options
        self._slots = FairQueue(_AT_A_TIME, most_of_tenant=_OF_TENANT)
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._cache = tempfile.TemporaryDirectory(prefix="paceline-data-")

    async def of(self, spec: JobSpec, *, wait_s: float = _WAIT_S) -> JobData:
        """What a job may read; its upload is unpacked.

        Rows of `dataset` have been read then, so that the time it takes does not count to that of
        trying plug-ins.

        Raises:
            InvalidError: rows are wrong, or not there.
            UnavailableError: the upload cannot be unpacked here, a store does not answer, or rows
                are still being read after `wait_s`.
        """
        uploaded = ""
        if spec.data is not None and spec.data.digest:
            uploaded = str(await self._folders.files(spec.data.digest))
        data = JobData(
            uploaded=uploaded,
            allowed=self._options.data_folders,
            cache=self._cache.name,
            cache_bytes=self._options.data_bytes,
            timeout_s=self._options.data_s,
            memory_bytes=self._options.data_memory_bytes,
        )
        if wanted := _wanted(spec):
            await self._read(spec.tenant, wanted, data, wait_s)
        return data

    async def _read(
        self,
        tenant: str,
        wanted: list[tuple[str, DatasetOptions]],
        data: JobData,
        wait_s: float,
    ) -> None:
        """Read rows, which goes on if the caller gives up, so that the next attempt finds them."""
        about = [data.uploaded, *(each.model_dump_json() for _, each in wanted)]
        key = digest_of(json.dumps(about).encode())
        if key not in self._reading:
            self._reading[key] = asyncio.create_task(self._read_in_turn(tenant, wanted, data))
            self._reading[key].add_done_callback(lambda _: self._reading.pop(key, None))
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(self._reading[key])
        except TimeoutError:
            raise UnavailableError(
                "data: their rows are still being read; submit again in a minute"
            ) from None

    async def _read_in_turn(
        self, tenant: str, wanted: list[tuple[str, DatasetOptions]], data: JobData
    ) -> None:
        async with self._slots.slot(QueueOwner(tenant)):
            await asyncio.to_thread(_read, wanted, data)

    async def again(self, spec: JobSpec) -> JobData:
        """As `of`, for a job that has been accepted: its files may be on a volume that comes back.

        Raises:
            UnavailableError: a file is not there; the job waits for it.
            InvalidError: as `of`.
        """
        try:
            return await self.of(spec, wait_s=_WAIT_AGAIN_S)
        except MissingDataError as error:
            raise UnavailableError(error.message) from None

    async def check_unchanged(self, job_id: str, digests: Mapping[str, str]) -> None:
        """Note what a job was submitted with, or compare with it.

        A job whose data have changed fails: its ledger names tasks by their position, so it could
        only train on other tasks than it says, and waiting would hold its GPUs for a file that
        nobody may ever bring back. Its checkpoints stay.

        Raises:
            InvalidError: files have changed since the job was submitted.
        """
        (noted,) = await self._jobs.noted(job_id, _DIGESTS)
        if not noted:
            if digests:
                await self._jobs.note(job_id, **{_DIGESTS: json.dumps(dict(digests))})
            return
        before: dict[str, str] = json.loads(noted)
        changed = sorted(name for name, each in digests.items() if before.get(name, each) != each)
        if changed:
            name = changed[0]
            raise InvalidError(
                f"data: {name} has changed since the job was submitted: its SHA-256 was "
                f"{before[name]} and is {digests[name]}; submit another job for the new data"
            )

    def close(self) -> None:
        """Delete all indexes."""
        self._cache.cleanup()


def _wanted(spec: JobSpec) -> list[tuple[str, DatasetOptions]]:
    """Options of `dataset` in a job, by field; what they refuse, the check of plug-ins says."""
    tasks = spec.tasks
    source = tasks.source
    if (source.kind if source is not None else tasks.environment) != _DATASET:
        return []
    options = tasks.options if source is None else source.options
    found = [(options_field(spec), DatasetOptions.model_validate(options))]
    for name, each in spec.eval_sets.items():
        changed = {**options, **(each.options if source is None else each.source)}
        found.append((options_field(spec, name), DatasetOptions.model_validate(changed)))
    return found


def _read(wanted: list[tuple[str, DatasetOptions]], data: JobData) -> None:
    for field, options in wanted:
        for at, each in enumerate(options.sources):
            if not each.environment:
                where = options.field_of(at, options=field)
                data.rows(each.path, each.shape, field=where)
