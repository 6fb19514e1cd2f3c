"""Packages that the code of jobs requires, on a worker: installed once, read by sealed processes.

A set of packages is named by all that it is made from, so that jobs and tenants can share it: none
of them can change what another one gets. No process of a job can write there.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.code.install import InstallError, install, shared_versions, size_of
from paceline.code.requirements import REQUIREMENTS, WHEELS, parse
from paceline.config.packages import PackageSettings
from paceline.digest import digest_of

KEPT_S = 6 * 3600.0  # sets that were used so lately are not deleted
RETRY_S = 60.0  # until what could not be installed is tried again
AT_A_TIME = 2
_LOCKED_S = 0.1
_MOST_FAILED = 256  # that are remembered
_BUILT, _GONE = "new-", "old-"


@dataclass(frozen=True, slots=True)
class PackageSet:
    """What the code in a folder requires."""

    requirements: tuple[str, ...]
    wheels: Path | None
    name: str

    @classmethod
    def of(cls, code: Path, settings: PackageSettings) -> PackageSet | None:
        """What a folder requires; None if nothing.

        Raises:
            InvalidError: its requirements are wrong.
        """
        file, wheels = code / REQUIREMENTS, code / WHEELS
        requirements = parse(file.read_bytes()) if file.is_file() else ()
        if not requirements:
            return None
        own = sorted(wheels.glob("*.whl"))
        made_from = {
            "requirements": sorted(requirements),
            "wheels": [[each.name, digest_of(each.read_bytes())] for each in own],
            "shared": shared_versions(),
            "python": [sys.implementation.cache_tag, sysconfig.get_platform()],
            "index": [settings.index_url, settings.no_index],
        }
        name = digest_of(json.dumps(made_from, sort_keys=True).encode())
        return cls(requirements, wheels if own else None, name)


class Packages:
    """Sets of packages in a folder that other workers of this machine may share."""

    def __init__(
        self, settings: PackageSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._root: Path | None = None
        self._slots = asyncio.Semaphore(AT_A_TIME)
        self._installing: dict[str, asyncio.Task[Path]] = {}
        self._failed: dict[str, tuple[float, str]] = {}

    def wanted(self, code: Path) -> PackageSet | None:
        """See `PackageSet.of`."""
        return PackageSet.of(code, self._settings)

    async def folder(self, wanted: PackageSet) -> Path:
        """The folder to import these packages from; installs them if they are not there.

        Goes on if the caller gives up, so that the next call finds them.

        Raises:
            InstallError: they cannot be installed; it is tried again after `RETRY_S`.
        """
        if not self._settings.install:
            raise InstallError(
                f"{REQUIREMENTS}: this installation installs no packages for jobs "
                "(setting packages.install); copy pure Python ones into the folder of the code"
            )
        when, why = self._failed.get(wanted.name, (0.0, ""))
        if why and self._clock() < when + RETRY_S:
            raise InstallError(why)
        task = self._installing.get(wanted.name)
        if task is None:
            task = self._installing[wanted.name] = asyncio.create_task(self._made(wanted))
            task.add_done_callback(lambda _: self._installing.pop(wanted.name, None))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End all installations."""
        tasks = list(self._installing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _made(self, wanted: PackageSet) -> Path:
        try:
            self._failed.pop(wanted.name, None)
            root = self._root = self._root or await asyncio.to_thread(_root_of, self._settings)
            target = root / wanted.name
            if await asyncio.to_thread(_found, target):
                return target
            async with _locked(root, wanted.name), self._slots:
                if not await asyncio.to_thread(_found, target):
                    await self._install(wanted, root)
        except (InstallError, OSError) as error:
            told = error.message if isinstance(error, InstallError) else str(error)
            why = f"{REQUIREMENTS}: cannot be installed: {told}"
            self._failed[wanted.name] = self._clock(), why
            if len(self._failed) > _MOST_FAILED:
                self._failed.pop(next(iter(self._failed)))
            raise InstallError(why) from None
        return target

    async def _install(self, wanted: PackageSet, root: Path) -> None:
        """Install beside the target, and move there what is complete."""
        draft = root / f"{_BUILT}{wanted.name}"
        shutil.rmtree(draft, ignore_errors=True)  # of a worker that was killed
        draft.mkdir()
        try:
            made = await install(
                wanted.requirements, wheels=wanted.wheels, into=draft, settings=self._settings
            )
            await asyncio.to_thread(_open_to_all, made)
            async with _locked(root, "all"):
                await asyncio.to_thread(_make_room, root, size_of(made), self._settings.cache_bytes)
                made.rename(root / wanted.name)
        finally:
            await asyncio.to_thread(shutil.rmtree, draft, True)


def _root_of(settings: PackageSettings) -> Path:
    """The folder of all sets; a folder that others could write to is not used."""
    name = f"paceline-packages-{os.getuid()}"
    root = settings.folder or Path(tempfile.gettempdir()) / name
    root.mkdir(mode=0o755, parents=settings.folder is not None, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InstallError(f"{root} is not a folder that only this user may write to")
    root.chmod(0o755)  # sealed processes may have another user
    return root


def _found(target: Path) -> bool:
    """Whether a set is there; it then counts as used."""
    with suppress(FileNotFoundError):
        os.utime(target)
    return target.is_dir()


@asynccontextmanager
async def _locked(root: Path, name: str) -> AsyncGenerator[None]:
    """Hold a lock among all workers of this machine; it is gone with its holder."""
    with (root / f"{name}.lock").open("wb") as file:
        while not _lock(file.fileno()):
            await asyncio.sleep(_LOCKED_S)
        yield


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_to_all(folder: Path) -> None:
    """Let every user read what is there, whatever the umask of this process is."""
    for parent, _, names in os.walk(folder):
        os.chmod(parent, 0o755)
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(0o444)


def _make_room(root: Path, num_bytes: int, most_bytes: int) -> None:
    """Delete sets that were not used for long, the oldest first, until another one fits.

    Raises:
        InstallError: the others are in use.
    """
    for left in itertools.chain(root.glob(f"{_GONE}*"), _abandoned(root)):  # locked meanwhile
        shutil.rmtree(left, ignore_errors=True)
    found = sorted(_sets(root), key=lambda each: each.stat().st_mtime)
    sizes = {each: size_of(each) for each in found}
    total = num_bytes + sum(sizes.values())
    for each in found:
        if total <= most_bytes:
            return
        if time.time() - each.stat().st_mtime > KEPT_S:
            gone = each.rename(root / f"{_GONE}{each.name}")
            shutil.rmtree(gone, ignore_errors=True)
            total -= sizes[each]
    if total > most_bytes:
        raise InstallError(
            f"no room: {total} bytes with the packages in use; packages.cache_bytes is {most_bytes}"
        )


def _sets(root: Path) -> Iterator[Path]:
    for each in root.iterdir():
        if each.is_dir() and not each.name.startswith((_BUILT, _GONE)):
            yield each


def _abandoned(root: Path) -> Iterator[Path]:
    """Drafts of workers that were killed."""
    for draft in root.glob(f"{_BUILT}*"):
        lock = root / f"{draft.name.removeprefix(_BUILT)}.lock"
        with lock.open("ab") as file:
            if _lock(file.fileno()):
                yield draft
