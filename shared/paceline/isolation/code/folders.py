"""The code of jobs on a worker, and the packages it requires: fetched and unpacked once."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.errors import UnavailableError
from paceline.isolation.code.archive import unpack
from paceline.isolation.code.packages import Packages, WantedPackages
from paceline.platform.beneath import mark_private
from paceline.platform.fair_queue import NO_OWNER, QueueOwner

MOST_FOLDERS = 32
MOST_BYTES = 8 << 30  # of all folders
KEPT_S = 3600.0  # processes that read a folder are asked for again within this time
Fetch = Callable[[str, BinaryIO], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CodeFolder:
    """Where the code of a job is, and the packages that it requires, if any."""

    path: Path
    packages: Path | None = None


@dataclass(frozen=True, slots=True)
class _Unpacked:
    path: Path
    wanted: WantedPackages | None
    num_bytes: int


class CodeFolders:
    """Folders of code by digest, in a temporary folder of this process."""

    def __init__(
        self,
        fetch: Fetch,
        *,
        packages: Packages | None,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fetch` writes the archive with a digest to a file; `most_bytes` of all folders.

        `packages`: installs what a code requires; None: nothing is installed.
        """
        self._most_bytes = most_bytes
        self._fetch = fetch
        self._packages = packages
        self._root = tempfile.TemporaryDirectory(prefix="paceline-code-")
        Path(self._root.name).chmod(0o755)  # programs in the sandbox may have another user
        mark_private(Path(self._root.name))
        self._found: dict[str, asyncio.Task[_Unpacked]] = {}
        self._used: dict[str, float] = {}  # when each was last asked for
        self._clock = clock

    async def folder(self, digest: str, owner: QueueOwner = NO_OWNER) -> CodeFolder:
        """The folder with this code, and that of the packages it requires, kept until `end`.

        Raises:
            InstallError: they cannot be installed.
            PacelineError: it cannot be fetched or unpacked; the next call tries again.
        """
        found = await self._unpacked(digest)
        if found.wanted is None or self._packages is None:
            return CodeFolder(found.path)
        return CodeFolder(found.path, await self._packages.folder(found.wanted, owner))

    async def files(self, digest: str) -> Path:
        """The folder with the files of an archive, without packages that it may require.

        Raises:
            PacelineError: it cannot be fetched or unpacked; the next call tries again.
        """
        return (await self._unpacked(digest)).path

    async def end(self, job_id: str) -> None:
        """A job is over: packages that no other uses may be deleted."""
        if self._packages is not None:
            self._packages.end(job_id)

    @property
    def jobs(self) -> set[str]:
        """Jobs for which something is kept."""
        return set() if self._packages is None else self._packages.jobs

    async def close(self) -> None:
        """Delete all folders, and end what is being installed."""
        if self._packages is not None:
            await self._packages.close()
        self._root.cleanup()

    async def _unpacked(self, digest: str) -> _Unpacked:
        if digest not in self._found:
            await self._make_room()
            self._found[digest] = asyncio.create_task(self._make(digest))
        self._used[digest] = self._clock()
        making = self._found[digest]
        try:
            return await asyncio.shield(making)
        finally:
            if making.done() and (making.cancelled() or making.exception()):
                self._found.pop(digest, None)
                self._used.pop(digest, None)

    async def _make_room(self) -> None:
        """Delete folders that nobody has asked for for long, if there are many or large ones.

        Raises:
            UnavailableError: there is no room, and all are in use.
        """
        for unused in sorted(self._found, key=lambda each: self._used[each]):
            full = self._num_bytes() >= self._most_bytes
            if len(self._found) < MOST_FOLDERS and not full:
                return
            if self._clock() - self._used[unused] < KEPT_S:
                break
            await self._drop(unused)
        if self._num_bytes() >= self._most_bytes:
            raise UnavailableError("code: no room for it here, as code of other jobs is in use")

    def _num_bytes(self) -> int:
        whole = (each for each in self._found.values() if each.done() and not each.cancelled())
        return sum(each.result().num_bytes for each in whole if each.exception() is None)

    async def _drop(self, digest: str) -> None:
        del self._found[digest], self._used[digest]
        root = Path(self._root.name)
        with suppress(FileNotFoundError):
            # Renamed, so that nobody finds it half deleted.
            gone = (root / digest).rename(root / f"old-{digest}")
            await asyncio.to_thread(shutil.rmtree, gone, True)

    async def _make(self, digest: str) -> _Unpacked:
        try:
            with tempfile.TemporaryFile() as archive:
                await self._fetch(digest, archive)
                folder = await asyncio.to_thread(unpack, archive, digest, Path(self._root.name))
        except OSError as error:
            raise UnavailableError(f"code: no room for it here: {error.strerror}") from None
        wanted = None
        if self._packages is not None:
            wanted = await asyncio.to_thread(self._packages.wanted, folder)
        return _Unpacked(folder, wanted, await asyncio.to_thread(_bytes_in, folder))


def _bytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
