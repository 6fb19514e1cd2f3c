"""Protocol of a fleet's programs: commands and events as JSON lines on stdin and stdout."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from paceline.config.service import LogSettings
from paceline.isolation.sandbox.pipes import ReadPipe
from paceline.platform.telemetry.logs import setup

Answer = Callable[..., Awaitable[dict[str, Any]]]
_MOST_LINE_BYTES = 1 << 20


def tell(event: str, **fields: Any) -> None:
    """Print an event with its time."""
    print(json.dumps({"event": event, "at_s": time.monotonic(), **fields}), flush=True)


async def answer(**answers: Answer) -> None:
    """Run the handler of each command until stdin closes."""
    setup(LogSettings())
    async for command in _commands():
        name = command.pop("do")
        tell(name, **await answers[name](**command))


async def usage() -> dict[str, Any]:
    """CPU seconds of this process."""
    return {"cpu_s": time.process_time()}


async def _commands() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader(limit=_MOST_LINE_BYTES)
    stdin = os.dup(0)
    os.set_blocking(stdin, False)
    reader.set_transport(ReadPipe(stdin, reader.feed_data, reader.feed_eof))
    while line := await reader.readline():
        yield json.loads(line)
