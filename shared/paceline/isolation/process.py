"""Processes that read frames and answer with frames, and how they are started and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from asyncio.subprocess import Process as Subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

KILL_TIMEOUT_S = 5.0
_UNREAD_BYTES = 1 << 20
_KEPT_WORDS = 4096  # bytes of standard error, the last ones
_PROGRAM = """
import sys
{paths}
from {module} import main
main(*{arguments!r})
"""


class ChildProcess(Protocol):
    """A process and its pipes: sealed (`sandbox.SealedProcess`), or a `PlainProcess`."""

    @property
    def stdout(self) -> asyncio.StreamReader:
        """What it answers."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes to it; nothing happens if it has ended."""
        ...

    async def exit_text(self) -> str:
        """How it has ended, and the last line that it has printed; waits until it has."""
        ...

    async def kill(self) -> None:
        """Kill it and what it has started, and close the pipes; the second time does nothing."""
        ...


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """Runs a module of ours as a program."""
    return (sys.executable, "-P", "-m", module, *arguments)


def open_command(module: str, *arguments: str | int) -> tuple[str, ...]:
    """Runs `main(*arguments)` of a module, with the import paths of this process."""
    paths = [path for path in sys.path if path]
    return (sys.executable, "-c", program(f"sys.path[:] = {paths!r}", module, arguments))


def bare_command(module: str, *folders: Path) -> tuple[str, ...]:
    """Runs `main()` of a module in these folders, which imports the standard library alone.

    It starts in a fraction of the time, as no installed package is looked for.
    """
    paths = f"sys.path += {[*map(str, folders)]!r}"
    return (sys.executable, *("-I", "-S", "-c"), program(paths, module, ()))


def program(paths: str, module: str, arguments: Sequence[str | int]) -> str:
    """The source that runs `main(*arguments)` of a module; `paths`: a line about `sys.path`."""
    return _PROGRAM.format(paths=paths, module=module, arguments=tuple(arguments))


class PlainProcess:
    """A process that may do what this one may, in a session of its own."""

    def __init__(self, process: Subprocess, transport: asyncio.SubprocessTransport) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdout = process.stdout
        self._process = process
        self._stdin = process.stdin
        self._transport = transport
        self._killed = False
        self._words = b""
        self._listening: asyncio.Task[None] | None = None
        if process.stderr is not None:
            self._listening = asyncio.create_task(self._listen(process.stderr), name="words")

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> PlainProcess:
        """Start a command; what it prints goes to the log of this process, or to `stderr`.

        `subprocess.PIPE` keeps the last lines for `exit_text`.

        Raises:
            OSError: it cannot be started.
        """
        loop = asyncio.get_running_loop()
        # As `asyncio.create_subprocess_exec` does, which keeps the transport to itself.
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(_UNREAD_BYTES, loop),
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=True,  # signals of a terminal are for the service
        )
        return cls(Subprocess(transport, protocol, loop), transport)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def write(self, data: bytes) -> None:
        """See `ChildProcess`."""
        if not self._stdin.is_closing():
            self._stdin.write(data)

    async def exit_text(self) -> str:
        """See `ChildProcess`."""
        code = await self._process.wait()
        if self._listening is not None:
            await asyncio.wait({self._listening})
        lines = self._words.decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f", {lines[-1]}" if lines else "")

    async def kill(self) -> None:
        """See `ChildProcess`."""
        if not self._killed:  # later, its number may be another's
            self._killed = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        # A process that left the session may hold a pipe open, which asyncio would wait for.
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self._process.wait()
                    if self._listening is not None:
                        await asyncio.wait({self._listening})
        finally:
            self._transport.close()
            if self._listening is not None:
                self._listening.cancel()

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(1 << 16):
            self._words = (self._words + data)[-_KEPT_WORDS:]
