"""Packages that the code of jobs requires, on a worker: installed once, read by sealed processes.

A set of packages is named by the digests of its wheels, so that jobs and tenants can share it: none
of them can change what another one gets. No process of a job can write there. What the wheels were
resolved from has a name too, so that an installed set needs no index.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.config.packages import PackageSettings
from paceline.isolation.code.file_locks import locked
from paceline.isolation.code.install import Installation, InstallError, shared_versions
from paceline.isolation.code.package_cache import (
    ALL,
    DRAFT,
    PackageCache,
    PackageQuotaError,
    lock_of,
)
from paceline.isolation.code.requirements import REQUIREMENTS, WHEELS, parse
from paceline.isolation.code.wheels.messages import LocalWheel
from paceline.isolation.code.wheels.sources import WheelSources
from paceline.isolation.code.wheels.wheel import WheelName
from paceline.platform.beneath import mark_private
from paceline.platform.digest import digest_of, digest_of_file
from paceline.platform.fair_queue import NO_OWNER, FairQueue, QueueOwner
from paceline.platform.telemetry.metrics import Metrics

RETRY_S = 60.0  # until what could not be installed is tried again
AT_A_TIME, MOST_OF_TENANT = 3, 2  # installations: another tenant need not wait for one
_MOST_FAILED = 256  # that are remembered
_PYTHON = (sys.implementation.cache_tag, sysconfig.get_platform())
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WantedPackages:
    """What the code in a folder requires, and where wheels come from."""

    requirements: tuple[str, ...]
    own: tuple[LocalWheel, ...]  # of the code
    sources: WheelSources
    inputs: str  # the digest of all that decides which wheels these are, but what indexes have

    @classmethod
    def of(cls, code: Path, settings: PackageSettings) -> WantedPackages | None:
        """What a folder requires; None if nothing.

        Raises:
            InvalidError: its requirements are wrong, or a wheel of it has no name of one.
            SourcesError: pip's configuration cannot be read.
        """
        file = code / REQUIREMENTS
        requirements = parse(file.read_bytes()) if file.is_file() else ()
        if not requirements:
            return None
        own = _own_wheels(code / WHEELS)
        sources = WheelSources.read(settings, os.environ)
        inputs = {
            "requirements": requirements,
            "wheels": [[each.path.name, each.digest] for each in own],
            "shared": shared_versions(),
            "python": _PYTHON,
            "sources": asdict(sources),
        }
        name = digest_of(json.dumps(inputs, sort_keys=True).encode())
        return cls(requirements, own, sources, name)


def _own_wheels(folder: Path) -> tuple[LocalWheel, ...]:
    """Files in the folder itself whose names end in `.whl`; nothing else in it counts."""
    if folder.is_symlink() or not folder.is_dir():
        return ()
    names = (path for path in sorted(folder.iterdir()) if path.suffix == ".whl")
    files = [path for path in names if path.is_file() and not path.is_symlink()]
    for path in files:
        WheelName.parse(path.name)
    return tuple(LocalWheel(path, _digest_of(path)) for path in files)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return digest_of_file(file)


def _set_name(wheels: Sequence[LocalWheel]) -> str:
    """The name of an installed set, which decides every byte of it."""
    made_from = {
        "wheels": sorted([each.path.name, each.digest] for each in wheels),
        "python": _PYTHON,
    }
    return digest_of(json.dumps(made_from, sort_keys=True).encode())


@dataclass(slots=True)
class _Use:
    """That jobs of a tenant use a set."""

    jobs: set[str]
    made: asyncio.Task[Path] | None = None
    fd: int | None = None  # of the lock that keeps it


class Packages:
    """Sets of packages in a folder that other workers of this machine may share.

    What a job has asked for is kept until `end`.
    """

    def __init__(
        self,
        settings: PackageSettings,
        *,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._metrics = metrics or Metrics()
        self._clock = clock
        self._cache: PackageCache | None = None
        self._slots = FairQueue(AT_A_TIME, most_of_tenant=MOST_OF_TENANT)
        self._waiting = 0
        self._uses: dict[tuple[str, str], _Use] = {}  # by tenant and inputs
        self._failed: dict[tuple[str, str], tuple[float, str, type[InstallError]]] = {}
        self._changes: set[asyncio.Task[Any]] = set()

    def wanted(self, code: Path) -> WantedPackages | None:
        """See `WantedPackages.of`."""
        return WantedPackages.of(code, self._settings)

    async def folder(self, wanted: WantedPackages, owner: QueueOwner = NO_OWNER) -> Path:
        """The folder to import these packages from; installs them if they are not there.

        Goes on if the caller gives up, so that the next call finds them.

        Raises:
            PackageQuotaError: jobs of the tenant use as much as they may.
            InstallError: they cannot be installed; it is tried again after `RETRY_S`.
        """
        if not self._settings.install:
            raise InstallError(
                f"{REQUIREMENTS}: this installation installs no packages for jobs "
                "(setting packages.install); copy pure Python ones into the folder of the code"
            )
        key = owner.tenant, wanted.inputs
        when, why, kind = self._failed.get(key, (0.0, "", InstallError))
        if why and self._clock() < when + RETRY_S:
            raise kind(why)
        use = self._uses.setdefault(key, _Use(set()))
        use.jobs.add(owner.job_id)
        if use.made is None:
            use.made = asyncio.create_task(self._made(wanted, owner, use))
        return await asyncio.shield(use.made)

    def end(self, job_id: str) -> None:
        """A job is over: what only it has used may be deleted."""
        for key, use in list(self._uses.items()):
            use.jobs.discard(job_id)
            if not use.jobs:
                self._let_go(key, use)

    @property
    def jobs(self) -> set[str]:
        """Jobs for which something is kept."""
        return {job_id for use in self._uses.values() for job_id in use.jobs}

    async def close(self) -> None:
        """End all installations, and keep nothing any more."""
        tasks = [use.made for use in self._uses.values() if use.made is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._changes, return_exceptions=True)
        for key, use in list(self._uses.items()):
            self._let_go(key, use)

    def _let_go(self, key: tuple[str, str], use: _Use) -> None:
        """Keep a set no longer; one that is being installed is let go once it is there."""
        if use.fd is not None and self._cache is not None:
            self._cache.release(use.fd)
            use.fd = None
            self._uses.pop(key, None)

    async def _made(self, wanted: WantedPackages, owner: QueueOwner, use: _Use) -> Path:
        key = owner.tenant, wanted.inputs
        try:
            self._failed.pop(key, None)
            cache = await self._opened()
            name = cache.resolved(wanted.inputs)
            fd = None if name is None else cache.hold(name, owner.tenant)
            if name is None or fd is None:
                name, fd = await self._claimed(cache, wanted, owner)
            use.fd = fd
        except (InstallError, OSError) as error:
            self._uses.pop(key, None)
            told = error.message if isinstance(error, InstallError) else str(error)
            kind = PackageQuotaError if isinstance(error, PackageQuotaError) else InstallError
            why = f"{REQUIREMENTS}: cannot be installed: {told}"
            self._failed[key] = self._clock(), why, kind
            if len(self._failed) > _MOST_FAILED:
                self._failed.pop(next(iter(self._failed)))
            raise kind(why) from None
        if not use.jobs:  # they have ended meanwhile
            self._let_go(key, use)
        return cache.root / name

    async def _opened(self) -> PackageCache:
        if self._cache is None:
            root = await asyncio.to_thread(_root_of, self._settings)
            self._cache = self._cache or PackageCache(root, self._settings)
        return self._cache

    async def _claimed(
        self, cache: PackageCache, wanted: WantedPackages, owner: QueueOwner
    ) -> tuple[str, int]:
        """The name of the set, and what keeps it."""
        claim = partial(cache.claim_resolved, wanted.inputs, owner.tenant)
        if (claimed := await self._changed(claim)) is not None:
            return claimed
        async with self._slot(owner), locked(lock_of(cache.root, wanted.inputs)):
            # Another worker may have installed it meanwhile.
            if (claimed := await self._changed(claim)) is not None:
                return claimed
            return await self._install(wanted, owner.tenant, cache)

    @asynccontextmanager
    async def _slot(self, owner: QueueOwner) -> AsyncGenerator[None]:
        self._count_waiting(1)
        try:
            await self._slots.acquire(owner)
        finally:
            self._count_waiting(-1)
        try:
            yield
        finally:
            self._slots.release(owner)

    def _count_waiting(self, change: int) -> None:
        self._waiting += change
        self._metrics.set("package_installs_waiting", self._waiting)

    async def _install(
        self, wanted: WantedPackages, tenant: str, cache: PackageCache
    ) -> tuple[str, int]:
        """Install beside the target, and move there what is complete."""
        draft = cache.root / f"{DRAFT}{wanted.inputs}"
        shutil.rmtree(draft, ignore_errors=True)  # of a worker that was killed
        draft.mkdir(mode=0o700)
        try:
            work = Installation.begin(draft, self._settings)
            wheels = await work.fetch(wanted.requirements, own=wanted.own, sources=wanted.sources)
            name = _set_name(wheels)
            fd = await self._changed(partial(cache.claim, name, tenant))
            if fd is None:  # no other requirements have led to the same wheels
                folder = await work.unpack(wheels)
                await asyncio.to_thread(_open_to_all, folder)
                fd = await self._changed(partial(cache.add, folder, name, tenant))
            cache.remember(wanted.inputs, name)
            return name, fd
        finally:
            await asyncio.to_thread(shutil.rmtree, draft, True)

    async def _changed(self, change: Callable[[], Result]) -> Result:
        """Change the folder while no other worker does, even if the caller gives up."""
        task = asyncio.create_task(self._change(change))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _change(self, change: Callable[[], Result]) -> Result:
        cache = await self._opened()
        async with locked(cache.root / ALL, keep=True):
            result = await asyncio.to_thread(change)
            self._metrics.set("package_cache_bytes", await asyncio.to_thread(cache.count_bytes))
            return result


def _root_of(settings: PackageSettings) -> Path:
    """The folder of all sets; a folder that others could write to is not used."""
    name = f"paceline-packages-{os.getuid()}"
    root = settings.folder or Path(tempfile.gettempdir()) / name
    root.mkdir(mode=0o755, parents=settings.folder is not None, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InstallError(f"{root} is not a folder that only this user may write to")
    root.chmod(0o755)  # sealed processes may have another user
    mark_private(root)
    return root


def _open_to_all(folder: Path) -> None:
    """Let every user read what is there, whatever the umask of this process is."""
    for parent, _, names in os.walk(folder):
        os.chmod(parent, 0o755)
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(0o444)
