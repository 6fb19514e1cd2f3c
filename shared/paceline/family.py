"""A child process and all that it starts, in a session of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

END_S = 5.0
_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Family:
    """Its first process, with pipes to it."""

    process: Process
    transport: asyncio.SubprocessTransport

    async def kill(self) -> None:
        """End all of it and close the pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # Something that left the family may hold a pipe open, and asyncio waits for pipes too.
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self.process.wait()
        finally:
            self.transport.close()


async def start_family(
    command: Sequence[str], *, stderr: bool = False, line_bytes: int = _LINE_BYTES
) -> Family:
    """Start it with pipes for its input and output, and for its errors if `stderr`.

    `line_bytes` is the longest line that can be read from it.

    Raises:
        OSError: it cannot be started.
    """
    loop = asyncio.get_running_loop()
    # As asyncio.create_subprocess_exec does, which keeps the transport to itself.
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(line_bytes, loop),
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE if stderr else None,
        start_new_session=True,
    )
    return Family(Process(transport, protocol, loop), transport)
