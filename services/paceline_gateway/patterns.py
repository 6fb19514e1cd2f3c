"""Regular expressions of job files, compiled where they can do no harm."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from paceline.errors import BusyError

MAX_PATTERN = 2_000
# By the clock; of the processor it has two seconds.
TIMEOUT_S = 10.0
# Of ASCII alone, a pattern of this length takes a few milliseconds to compile, whatever it says.
# What takes long are classes of many characters, ten milliseconds each where case is ignored.
_SHORT = 1_000
_WIDE = re.compile(r"\\[xuUN]")
_WAIT_S = 10.0
_ROOM = 4
_CODE = """
import json, os, re, resource, sys
os.nice(10)
resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
def problem(pattern):
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""
json.dump([problem(each) for each in json.load(sys.stdin)], sys.stdout)
"""


class Patterns:
    """Says what is wrong with regular expressions, in bounded time."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_ROOM)
        self._turns: dict[str, asyncio.Lock] = {}

    async def problems(self, patterns: Sequence[str], tenant: str) -> list[str]:
        """Why each is no regular expression to be used; empty if it is one.

        Raises:
            BusyError: too many take long at this moment.
        """
        if any(len(each) > MAX_PATTERN for each in patterns):
            return [_length(each) for each in patterns]
        if all(each.isascii() and not _WIDE.search(each) for each in patterns) and (
            sum(map(len, patterns)) <= _SHORT
        ):
            return [_compiled(each) for each in patterns]
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(_WAIT_S):
                    # Of one tenant one at a time: the places are for several.
                    await held.enter_async_context(self._turns.setdefault(tenant, asyncio.Lock()))
                    await held.enter_async_context(self._room)
            except TimeoutError:
                raise BusyError("reward: many patterns are being checked; try again") from None
            return await _apart(patterns)


def _length(pattern: str) -> str:
    if len(pattern) <= MAX_PATTERN:
        return ""
    return f"has {len(pattern)} characters; at most {MAX_PATTERN} are allowed"


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return ""


async def _apart(patterns: Sequence[str]) -> list[str]:
    """As `_compiled`, in a process that ends soon."""
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _CODE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, _ = await made.communicate(json.dumps(list(patterns)).encode())
        said: list[Any] = json.loads(out)
    except (TimeoutError, ValueError):
        return ["takes too long, or too much memory, to compile"] * len(patterns)
    finally:
        if made.returncode is None:
            made.kill()
            await made.wait()
    return list(map(str, said))
