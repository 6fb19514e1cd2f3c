"""A program beside a service that stays, trusted as the service is: with its network and files."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

_UNREAD_BYTES = 1 << 20
_PROGRAM = """
import sys
sys.path[:] = {paths!r}
from {module} import main
main(*{arguments!r})
"""


class OpenProcess:
    """Like a `SealedProcess`, without seals: what it prints goes to the log of the service."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self.stdout = process.stdout
        self._process = process
        self._killed = False

    @classmethod
    async def start(cls, module: str, *arguments: str | int) -> OpenProcess:
        """Run `main(*arguments)` of a module, with the import paths of this process."""
        paths = [path for path in sys.path if path]
        source = _PROGRAM.format(paths=paths, module=module, arguments=arguments)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", source),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_UNREAD_BYTES,
            start_new_session=True,  # signals of a terminal are for the service
        )
        return cls(process)

    def write(self, data: bytes) -> None:
        """Send a request; nothing happens if it has ended."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(data)

    async def exit_text(self) -> str:
        """How it has ended."""
        return f"exit code {await self._process.wait()}"

    async def kill(self) -> None:
        """Kill it and what it has started."""
        if not self._killed:  # later, its number may be another's
            self._killed = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
