"""The code of jobs on a worker: fetched once, unpacked once."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from paceline.code.archive import unpack

Fetch = Callable[[str], Awaitable[bytes]]


class CodeFolders:
    """Folders of code by digest, in a temporary folder of this process."""

    def __init__(self, fetch: Fetch) -> None:
        """`fetch` returns the archive with a digest."""
        self._fetch = fetch
        self._root = tempfile.TemporaryDirectory(prefix="paceline-code-")
        Path(self._root.name).chmod(0o755)  # programs in the sandbox may have another user
        self._found: dict[str, asyncio.Task[Path]] = {}

    async def folder(self, digest: str) -> Path:
        """The folder with this code.

        Raises:
            PacelineError: it cannot be fetched or unpacked; the next call tries again.
        """
        if digest not in self._found:
            self._found[digest] = asyncio.create_task(self._make(digest))
        making = self._found[digest]
        try:
            return await asyncio.shield(making)
        finally:
            if making.done() and (making.cancelled() or making.exception()):
                self._found.pop(digest, None)

    def close(self) -> None:
        """Delete all folders."""
        self._root.cleanup()

    async def _make(self, digest: str) -> Path:
        archive = await self._fetch(digest)
        return await asyncio.to_thread(unpack, archive, digest, Path(self._root.name))
