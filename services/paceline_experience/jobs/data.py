"""Data of jobs in this service: unpacked, read once before plug-ins are tried, and known again."""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from paceline.config.service import ExperienceOptions
from paceline.data import JobData, MissingDataError, UnreadError
from paceline.environments.dataset.options import DatasetOptions, SourceOptions
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.isolation.code.folders import CodeFolders
from paceline.platform.beneath import mark_private
from paceline.platform.digest import digest_of
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.platform.files import lock_for_life
from paceline.platform.telemetry.logs import Log
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.ledger.generation.plan import WantedTasks

_AT_A_TIME, _OF_TENANT = 2, 1  # jobs whose rows are read
_WAIT_S = 20.0  # for rows that are being read; clients wait for 30 s
_WAIT_AGAIN_S = 5.0  # while other jobs are to be opened
_KEEP_FAILURES_S = 600.0  # for those who submit again
_MOST_FAILURES = 1000
_CLOSE_S = 5.0  # for files that cannot be listed, as those of a server that hangs
_CACHE, _LOCK = "paceline-experience-data-", "lock"
_DATASET = "dataset"
_DIGESTS = "data_digests"
log = Log("data")


@dataclass(frozen=True, slots=True)
class _Failure:
    """How reading ended, of these files."""

    files: list[str]
    error: PacelineError
    until: float  # by the clock of `time.monotonic`


class ReadsData(Protocol):
    """Reads the rows of a job."""

    async def of(self, job: JobParts) -> JobData:
        """What a job may read, as `DataOfJobs.of`."""
        ...


class JobNotes(Protocol):
    """Fields of the records of jobs, as strings."""

    async def noted(self, job_id: str, *names: str) -> list[str]:
        """Fields of a record; empty where none was set."""
        ...

    async def note(self, job_id: str, **fields: str) -> None:
        """Set fields of a record."""
        ...


class DataOfJobs:
    """What the jobs of this service may read."""

    def __init__(
        self,
        *,
        folders: CodeFolders,
        jobs: JobNotes,
        options: ExperienceOptions,
        wait_again_s: float = _WAIT_AGAIN_S,
    ) -> None:
        self._wait_again_s = wait_again_s
        self._folders = folders
        self._jobs = jobs
        self._options = options
        self._slots = FairQueue(_AT_A_TIME, most_of_tenant=_OF_TENANT)
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._failed: OrderedDict[str, _Failure] = OrderedDict()
        self._stopped = threading.Event()
        self._cache, self._lock = cache_folder()

    async def of(self, job: JobParts, *, wait_s: float = _WAIT_S) -> JobData:
        """What a job may read; its upload is unpacked.

        Rows of `dataset` have been read then, so that the time it takes does not count to that of
        trying plug-ins.

        Raises:
            InvalidError: rows are wrong; `MissingDataError`: they are not there; `UnreadError`:
                reading them took too long, or ended its process.
            UnavailableError: the upload cannot be unpacked here, a store does not answer, or rows
                are still being read after `wait_s`.
        """
        uploaded = ""
        if job.data:
            uploaded = str(await self._folders.files(job.data))
        data = JobData(
            uploaded=uploaded,
            allowed=self._options.data_folders,
            cache=str(self._cache),
            cache_bytes=self._options.data_bytes,
            timeout_s=self._options.data_s,
            memory_bytes=self._options.data_memory_bytes,
            stopped=self._stopped,
        )
        if wanted := _wanted(job.tasks):
            await self._read(job.tenant, wanted, data, wait_s)
        return data

    async def _read(
        self,
        tenant: str,
        wanted: list[tuple[str, DatasetOptions]],
        data: JobData,
        wait_s: float,
    ) -> None:
        """Read rows, which goes on if the caller gives up; the next attempt finds how it ended."""
        about = [data.uploaded, *(each.model_dump_json() for _, each in wanted)]
        key = digest_of(json.dumps(about).encode())
        if key not in self._reading:
            self._reading[key] = asyncio.create_task(self._read_in_turn(key, tenant, wanted, data))
            self._reading[key].add_done_callback(lambda task: self._ended(key, task))
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(self._reading[key])
        except TimeoutError:
            raise UnavailableError(
                "data: their rows are still being read; submit again in a minute"
            ) from None
        except (UnavailableError, MissingDataError, UnreadError):
            self._failed.pop(key, None)  # somebody knows; it may go well the next time
            raise

    async def _read_in_turn(
        self, key: str, tenant: str, wanted: list[tuple[str, DatasetOptions]], data: JobData
    ) -> None:
        async with self._slots.slot(QueueOwner(tenant)):
            files = await asyncio.to_thread(_identity, wanted, data)
            before = self._failed.pop(key, None)
            if before is not None and before.files == files and before.until > time.monotonic():
                self._failed[key] = before
                raise type(before.error)(before.error.message)
            try:
                await asyncio.to_thread(_read, wanted, data)
            except PacelineError as error:
                self._failed[key] = _Failure(files, error, time.monotonic() + _KEEP_FAILURES_S)
                while len(self._failed) > _MOST_FAILURES:
                    self._failed.popitem(last=False)
                raise

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        self._reading.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("rows are not read", error=error)  # for a caller who may have given up

    async def again(self, job: JobParts) -> JobData:
        """As `of`, for a job that has been accepted: its files may be on a volume that comes back.

        Raises as `of`.
        """
        return await self.of(job, wait_s=self._wait_again_s)

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

    async def close(self) -> None:
        """Give up what is being read, and delete all indexes."""
        self._stopped.set()
        if self._reading:
            await asyncio.wait(self._reading.values(), timeout=_CLOSE_S)
        shutil.rmtree(self._cache, ignore_errors=True)
        self._lock.close()


def cache_folder() -> tuple[Path, IO[str]]:
    """A new folder for indexes, and the lock by which it is known that this process lives.

    Folders of processes that were killed are deleted.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{_CACHE}*/{_LOCK}"):
        with suppress(OSError), lock.open("rb") as file:  # OSError: it is locked, or another's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=_CACHE))
    mark_private(made)
    return made, lock_for_life(made / _LOCK, what="the indexes of data")


def _wanted(tasks: Sequence[WantedTasks]) -> list[tuple[str, DatasetOptions]]:
    """Options of `dataset` in a job, by field; what they refuse, the check of plug-ins says."""
    return [
        (each.options_field, DatasetOptions.model_validate(each.options))
        for each in tasks
        if each.environment == _DATASET
    ]


def _of_rows(
    wanted: list[tuple[str, DatasetOptions]],
) -> Iterator[tuple[SourceOptions, str]]:
    """Sources that are rows, and their fields."""
    for field, options in wanted:
        for at, each in enumerate(options.sources):
            if not each.environment:
                yield each, options.field_of(at, options=field)


def _identity(wanted: list[tuple[str, DatasetOptions]], data: JobData) -> list[str]:
    return [data.identity(e.path, e.shape, field=field) for e, field in _of_rows(wanted)]


def _read(wanted: list[tuple[str, DatasetOptions]], data: JobData) -> None:
    for each, field in _of_rows(wanted):
        data.rows(each.path, each.shape, field=field)
