"""Processes that read frames and answer with frames, and how they are started and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol, cast

KILL_TIMEOUT_S = 5.0
_KEPT_WORDS = 4096  # bytes of standard error, the last ones
_PROGRAM = """
import sys
{paths}
from {module} import main
main(*{arguments!r})
"""


class ChildProcess(Protocol):
    """A process and its pipes: sealed (`sandbox.SealedProcess`), or a `PlainProcess`."""

    def receive(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Hand over what it answers as it arrives; `on_end` is called once."""
        ...

    def pause(self) -> None:
        """Leave what it answers in its pipe."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
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


class _Pipes(asyncio.SubprocessProtocol):
    """Answers of a process; those that arrive before `receive` are kept for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.exited: asyncio.Future[None] = loop.create_future()
        self.silent: asyncio.Future[None] = loop.create_future()
        self.words = b""
        self.on_data: Callable[[bytes], None] = self._keep
        self.on_end: Callable[[], None] = self._keep_end
        self._early, self._over = b"", False

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self.on_data(data)
        else:
            self.words = (self.words + data)[-_KEPT_WORDS:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.on_end()
        elif fd == 2 and not self.silent.done():
            self.silent.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def hand_to(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self.on_data, self.on_end = on_data, on_end
        if self._early:
            on_data(self._early)
        if self._over:
            on_end()

    def _keep(self, data: bytes) -> None:
        self._early += data

    def _keep_end(self) -> None:
        self._over = True


class PlainProcess:
    """A process that may do what this one may, in a session of its own."""

    def __init__(self, transport: asyncio.SubprocessTransport, pipes: _Pipes) -> None:
        self._transport = transport
        self._pipes = pipes
        self._stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
        self._stdout = cast("asyncio.ReadTransport", transport.get_pipe_transport(1))
        self._ends = [pipes.exited]
        if transport.get_pipe_transport(2) is not None:
            self._ends.append(pipes.silent)
        self._killed = False

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
        transport, pipes = await loop.subprocess_exec(
            lambda: _Pipes(loop),
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=True,  # signals of a terminal are for the service
        )
        return cls(transport, pipes)

    @property
    def pid(self) -> int:
        """Its number."""
        pid = self._transport.get_pid()
        assert pid is not None
        return pid

    def receive(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """See `ChildProcess`."""
        self._pipes.hand_to(on_data, on_end)

    def pause(self) -> None:
        """See `ChildProcess`."""
        if not self._stdout.is_closing():
            self._stdout.pause_reading()

    def resume(self) -> None:
        """See `ChildProcess`."""
        if not self._stdout.is_closing():
            self._stdout.resume_reading()

    def write(self, data: bytes) -> None:
        """See `ChildProcess`."""
        if not self._stdin.is_closing():
            self._stdin.write(data)

    async def exit_text(self) -> str:
        """See `ChildProcess`."""
        await asyncio.wait(self._ends)
        lines = self._pipes.words.decode(errors="replace").strip().splitlines()
        return f"exit code {self._transport.get_returncode()}" + (f", {lines[-1]}" if lines else "")

    async def kill(self) -> None:
        """See `ChildProcess`."""
        if not self._killed:  # later, its number may be another's
            self._killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        try:  # a process that has left the session may hold the pipes open
            await asyncio.wait(self._ends, timeout=KILL_TIMEOUT_S)
        finally:
            self._transport.close()
