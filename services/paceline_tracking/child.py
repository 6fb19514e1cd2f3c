"""The process of a tracker as its feed sees it: requests with a time limit, then SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paceline_tracking.secrets import without_secrets

COMMAND = (sys.executable, "-m", "paceline_tracking.host")
MOST_WORDS = 2000
LINE_BYTES = 1 << 20
END_S = 5.0


class TrackerError(Exception):
    """A tracker did not do what it was asked; `reason`: hung, crashed or refused."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Child:
    """One process; after any error it is of no use any more."""

    def __init__(self, process: Process, transport: asyncio.SubprocessTransport) -> None:
        self._process = process
        self._transport = transport
        self._words = b""
        self._listening = asyncio.create_task(self._listen(), name="tracker's words")

    @classmethod
    async def start(cls, command: Sequence[str] = COMMAND) -> Child:
        """Start it, with its family in a session of their own."""
        loop = asyncio.get_running_loop()
        # As asyncio.create_subprocess_exec does, which keeps the transport to itself.
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(LINE_BYTES, loop),
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
        return cls(Process(transport, protocol, loop), transport)

    async def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            TrackerError: it takes too long, has ended, or says that it could not.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._exchange(json.dumps(request).encode() + b"\n")
        except TimeoutError:
            verb = next(iter(request))
            raise TrackerError("hung", f"no answer to {verb} in {timeout_s:g} s") from None
        try:
            answer = json.loads(line)
        except ValueError:
            raise TrackerError("crashed", await self._last_words()) from None
        if "error" in answer:
            raise TrackerError("refused", answer["error"])
        return answer

    async def kill(self) -> None:
        """End it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Something that left the family may hold the pipe open, and asyncio waits for pipes too.
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._process.wait()
        finally:
            self._transport.close()
            self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _exchange(self, line: bytes) -> bytes:
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        try:
            writer.write(line)
            await writer.drain()
            return await reader.readline()
        except (ConnectionError, ValueError):
            return b""

    async def _last_words(self) -> str:
        """The last line that it wrote, once it has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
                await asyncio.shield(self._listening)
        lines = self._words.decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        last = lines[-1] if lines else "no words"
        return without_secrets(f"ended with {code}: {last}")

    async def _listen(self) -> None:
        reader = self._process.stderr
        assert reader is not None
        while chunk := await reader.read(1 << 16):
            self._words = (self._words + chunk)[-MOST_WORDS:]
