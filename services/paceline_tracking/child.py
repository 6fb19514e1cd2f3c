"""Starts a tracker process and sends it requests with a timeout."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paceline.server.process_group import KILL_TIMEOUT_S, ProcessGroup, start_process_group
from paceline_tracking.secrets import without_secrets

COMMAND = (sys.executable, "-P", "-m", "paceline_tracking.host")
MOST_WORDS = 2000
LINE_BYTES = 1 << 20


class TrackerError(Exception):
    """A tracker failed a request; `reason`: hung, crashed or refused."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class TrackerProcess:
    """One tracker process; it must be replaced after any error."""

    def __init__(self, family: ProcessGroup) -> None:
        self._family = family
        self._process = family.process
        self._words = b""
        self._listening = asyncio.create_task(self._listen(), name="tracker's words")

    @classmethod
    async def start(cls, command: Sequence[str] = COMMAND) -> TrackerProcess:
        """Start the process in a session of its own."""
        return cls(await start_process_group(command, stderr=True, line_bytes=LINE_BYTES))

    async def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            TrackerError: it timed out, has exited, or returned an error.
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
        """Kill the process and all processes that it has started."""
        try:
            await self._family.kill()
        finally:
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
        """The last line of its stderr, after it has exited."""
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
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
