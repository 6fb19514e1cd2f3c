"""Runs a child process and its descendants in a session of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

KILL_TIMEOUT_S = 5.0
_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A session of processes, with pipes to its leader."""

    process: Process
    transport: asyncio.SubprocessTransport

    async def kill(self) -> None:
        """Kill the whole session and close the pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # A process that left the session may hold a pipe open, which asyncio would wait for.
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self.process.wait()
        finally:
            self.transport.close()


async def start_process_group(
    command: Sequence[str], *, stderr: bool = False, line_bytes: int = _LINE_BYTES
) -> ProcessGroup:
    """Start a command with pipes for stdin and stdout, and for stderr if wanted.

    `line_bytes` is the maximum length of a line read from it.

    Raises:
        OSError: the command cannot be started.
    """
    loop = asyncio.get_running_loop()
    # Like asyncio.create_subprocess_exec, which does not expose the transport.
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(line_bytes, loop),
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE if stderr else None,
        start_new_session=True,
    )
    return ProcessGroup(Process(transport, protocol, loop), transport)
