"""Tasks of environments that came with a job: listed once, in a sealed process, and stored."""

from __future__ import annotations

import asyncio
import itertools
import json
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

from pydantic_core import from_json

from paceline.data import JobData
from paceline.errors import InvalidError, PacelineError, QuotaError, UnavailableError
from paceline.isolation.code.folders import CodeFolder, CodeFolders
from paceline.isolation.code.install import InstallError
from paceline.isolation.code.package_cache import PackageQuotaError
from paceline.isolation.code.requirements import REQUIREMENTS
from paceline.isolation.code.world_process import (
    ProcessEndedError,
    WorldError,
    WorldProcess,
    WorldRefusedError,
)
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.platform.digest import digest_of
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.telemetry.logs import Log
from paceline.plugins import TaskSource
from paceline.types import Task
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.ledger.generation.plan import WantedTasks
from paceline_experience.ledger.sources import Sources, task_sources

log = Log("own tasks")
MAX_TASKS = 200_000
MAX_BYTES = 64 << 20  # of the tasks of a job, as JSON
_FIELDS = ("task_id", "environment", "payload", "seed", "domain")
_AT_A_TIME = 2  # lists of a tenant that are made
_FOLLOW_S = 1.0
_WORLD_S = 10.0  # for the import of a world, whose tasks are listed
_KEEP_S = 5.0  # until the next job is looked after
_ROW_BYTES = 64  # what a row costs besides its text


class KeepsTasks(Protocol):
    """Where lists of tasks are kept, compressed, by what they were made from."""

    async def tasks(self, name: str) -> bytes | None:
        """A list; None: it is not kept."""
        ...

    async def put_tasks(self, name: str, tasks: bytes) -> None:
        """Keep a list."""
        ...


class StoredTasks:
    """A `TaskSource` of tasks in memory."""

    def __init__(self, rows: list[list[Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int, /) -> Task:
        return Task(*self._rows[position])

    def position_of(self, task_id: str, /) -> int | None:
        """The position of the task with this id; None: there is none."""
        return self._positions.get(task_id)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {row[0]: position for position, row in enumerate(self._rows)}


@dataclass(frozen=True, slots=True)
class _Listing:
    """Tasks that the code of a job lists."""

    tenant: str
    code: str  # digest
    wanted: WantedTasks

    @property
    def name(self) -> str:
        """The same for the same tasks, whoever asks."""
        wanted = self.wanted
        made_from = [self.code, wanted.environment, wanted.seed, wanted.options]
        return digest_of(json.dumps(made_from, sort_keys=True).encode())


class OwnTasks:
    """Lists the tasks of jobs, once for the same code and options."""

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        folders: CodeFolders,
        store: KeepsTasks,
        timeout_s: float,
        memory_bytes: int,
    ) -> None:
        """Listing all tasks may take `timeout_s` and so much address space."""
        self._memory_bytes = memory_bytes
        self._sandbox = sandbox
        self._folders = folders
        self._store = store
        self._timeout_s = timeout_s
        self._slots: dict[str, asyncio.Semaphore] = {}  # by tenant
        self._numbers = itertools.count()
        self._listing: dict[str, asyncio.Task[bytes]] = {}

    async def sources(self, tenant: str, code: str, wanted: Sequence[WantedTasks]) -> Sources:
        """The tasks of a job of this tenant and code.

        Raises:
            InvalidError: its code fails, or returns too many or no tasks.
            UnavailableError: this machine cannot contain the code.
        """
        sources = [await self._source(_Listing(tenant, code, each)) for each in wanted]
        names = [each.evaluation or "" for each in wanted[1:]]
        return Sources(sources[0], dict(zip(names, sources[1:], strict=True)))

    async def follow(self, live: Callable[[], Mapping[QueueOwner, str]]) -> None:
        """Keep the packages of live jobs, until cancelled, so that what a tenant uses is known.

        `live` returns the code of each.
        """
        kept: dict[QueueOwner, str] = {}
        while True:
            now = live()
            for owner in kept.keys() - now.keys():
                del kept[owner]
                await self._folders.end(owner.job_id)
            for owner, code in now.items():
                if owner not in kept and await self._keep(code, owner):
                    kept[owner] = code
            await asyncio.sleep(_FOLLOW_S)

    async def _keep(self, code: str, owner: QueueOwner) -> bool:
        try:
            async with asyncio.timeout(_KEEP_S):
                await self._folders.folder(code, owner)
        except TimeoutError:  # goes on
            return False
        except PacelineError as error:  # whoever needs them hears of it too
            log.warning("packages of a job cannot be kept", job=owner.job_id, error=error)
            await self._folders.end(owner.job_id)
            return False
        return True

    async def prepare(self, code: str, tenant: str) -> None:
        """Install what a code requires, so that its submitter hears what is wrong with it.

        Raises:
            InvalidError: it cannot be installed.
            QuotaError: packages of the tenant's jobs take as much as they may.
            UnavailableError: it takes long; goes on, so that a later call finds it.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._for_a_moment(code, tenant):
                    pass
        except PackageQuotaError as error:
            raise QuotaError(f"code: {error.message}") from None
        except InstallError as error:
            raise InvalidError(f"code: {error.message}") from None
        except TimeoutError:
            raise UnavailableError(
                f"code: {REQUIREMENTS}: still being installed; submit again in a minute"
            ) from None

    @asynccontextmanager
    async def _for_a_moment(self, code: str, tenant: str) -> AsyncGenerator[CodeFolder]:
        """A folder of code and its packages, before a job exists for which they are kept."""
        owner = QueueOwner(tenant, f"submit-{next(self._numbers)}")
        try:
            yield await self._folders.folder(code, owner)
        finally:
            await self._folders.end(owner.job_id)

    async def close(self) -> None:
        """End all processes."""
        await self._sandbox.close()
        await self._folders.close()

    async def _source(self, listing: _Listing) -> TaskSource:
        name = listing.name
        stored = await self._store.tasks(name)
        if stored is None:
            # Goes on if the caller gives up, so that the next attempt finds it.
            if name not in self._listing:
                self._listing[name] = asyncio.create_task(self._listed_and_stored(listing))
                self._listing[name].add_done_callback(lambda _: self._listing.pop(name, None))
            stored = await asyncio.shield(self._listing[name])
        return StoredTasks(await asyncio.to_thread(_rows, stored))

    async def _listed_and_stored(self, listing: _Listing) -> bytes:
        stored = await self._listed(listing)
        await self._store.put_tasks(listing.name, stored)
        return stored

    async def _listed(self, listing: _Listing) -> bytes:
        """All tasks, compressed."""
        wanted = listing.wanted
        field, target = wanted.field, wanted.environment
        slots = self._slots.setdefault(listing.tenant, asyncio.Semaphore(_AT_A_TIME))
        async with slots, self._for_a_moment(listing.code, listing.tenant) as folder:
            process = await WorldProcess.start(
                self._sandbox, folder, target, threads=1, memory_bytes=self._memory_bytes
            )
            try:
                async with asyncio.timeout(self._timeout_s):
                    rows = await _ask(process, wanted)
                if rows:
                    await _check_world(process, wanted)
            except TimeoutError:
                text = f"{target} did not list its tasks within {self._timeout_s:g} s"
                raise InvalidError(f"{field}: {text}") from None
            except (WorldError, WorldRefusedError, ProcessEndedError) as error:
                raise InvalidError(f"{field}.options: {target}: {error.message}") from None
            finally:
                await process.kill()
        if not rows:
            text = f"{target} with options {dict(wanted.options)} has no tasks"
            raise InvalidError(f"{field}: {text}")
        return await asyncio.to_thread(lambda: zlib.compress(json.dumps(rows).encode(), 1))


async def _ask(process: WorldProcess, wanted: WantedTasks) -> list[list[Any]]:
    rows: list[list[Any]] = []
    left, field = MAX_BYTES, wanted.field
    asked = {"seed": wanted.seed, "options": wanted.options, "most": MAX_TASKS}
    async with process.answers("tasks", **asked) as answers:
        while True:
            answer = await answers.next()
            found = answer.get("tasks")
            if not isinstance(found, list):
                raise WorldError("unreadable tasks")
            for raw in cast("list[Any]", found):
                row = row_of(raw)
                left -= _ROW_BYTES + sum(len(each) for each in row if isinstance(each, str))
                if left < 0:
                    raise InvalidError(f"{field}: more than {MAX_BYTES} bytes of tasks")
                if len(rows) == MAX_TASKS:
                    raise InvalidError(f"{field}: more than {MAX_TASKS} tasks")
                rows.append(row)
            if "size" not in answer:
                continue
            if answer["size"] != len(rows):
                text = f"{answer['size']} tasks; at most {MAX_TASKS} are allowed"
                raise InvalidError(f"{field}: {text}")
            return rows


async def _check_world(process: WorldProcess, wanted: WantedTasks) -> None:
    """Raise for worlds that cannot be made, as far as this process can tell in a moment."""
    try:
        async with asyncio.timeout(_WORLD_S):
            await process.call("check_world", options=wanted.options)
    except (TimeoutError, ProcessEndedError) as error:  # workers have more time and memory
        log.warning("a world is not checked", target=wanted.environment, error=error)


def row_of(raw: Any) -> list[Any]:
    """The fields of a task that the job's code has sent."""
    try:
        row = [raw[name] for name in _FIELDS]
        from_json(row[2])  # a text in it can be half a surrogate pair, by its escape
        seed = row[3]
        if not all(isinstance(row[at], str) for at in (0, 1, 2, 4)) or type(seed) is not int:
            raise TypeError("fields of a wrong type")
        if not all(row[at].isprintable() for at in (0, 1, 4)):
            raise ValueError("its id, environment and domain must be printable")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed {seed} has more than 64 bits")
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise WorldError(f"unreadable task: {error}") from None
    return row


def _rows(stored: bytes) -> list[list[Any]]:
    return json.loads(zlib.decompress(stored))


async def sources_of(job: JobParts, own: OwnTasks, data: JobData) -> Sources:
    """The tasks of a job, wherever they come from; `data`: what they may read.

    Raises:
        InvalidError: there are none.
    """
    if not job.lists_own_tasks:
        return await asyncio.to_thread(task_sources, job.tasks, data)
    assert job.code is not None
    return await own.sources(job.tenant, job.code, job.tasks)
