"""Compiles regular expressions of job files in a child process with limits."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from paceline.errors import BusyError

MAX_PATTERN = 2_000
# Wall clock; of CPU time the child has two seconds.
TIMEOUT_S = 10.0
# An ASCII pattern of this length compiles within milliseconds. Slow are classes of many
# characters: ten milliseconds each if case is ignored.
_SHORT = 1_000
_WIDE = re.compile(r"\\[xuUN]")
_QUEUE_TIMEOUT_S = 10.0
_MAX_CHILDREN = 4
_CODE = """
import json, os, re, resource, sys
os.nice(10)
resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
def problem(pattern):
    try:
        re.compile(pattern)
    except RecursionError:
        return "maximum recursion depth exceeded"  # Python's own text depends on the depth
    except (re.error, OverflowError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""
json.dump([problem(each) for each in json.load(sys.stdin)], sys.stdout)
"""

Compile = Callable[[Sequence[str]], Awaitable[list[str]]]


class Patterns:
    """Finds problems of regular expressions, in bounded time.

    `in_child` returns the problem of each pattern, found where a pattern may take its time.
    """

    def __init__(self, in_child: Compile | None = None) -> None:
        self._in_child = in_child or _compile_in_child
        self._children = asyncio.Semaphore(_MAX_CHILDREN)
        self._tenants: dict[str, asyncio.Lock] = {}

    async def problems(self, patterns: Sequence[str], tenant: str) -> list[str]:
        """The problem of each pattern; empty: none.

        Raises:
            BusyError: too many slow patterns are being checked.
        """
        if any(len(each) > MAX_PATTERN for each in patterns):
            return [_length(each) for each in patterns]
        if all(each.isascii() and not _WIDE.search(each) for each in patterns) and (
            sum(map(len, patterns)) <= _SHORT
        ):
            return [_compiled(each) for each in patterns]
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                    # One child per tenant, so that one tenant cannot take them all.
                    await held.enter_async_context(self._tenants.setdefault(tenant, asyncio.Lock()))
                    await held.enter_async_context(self._children)
            except TimeoutError:
                raise BusyError("reward: many patterns are being checked; try again") from None
            return await self._in_child(patterns)


def _length(pattern: str) -> str:
    if len(pattern) <= MAX_PATTERN:
        return ""
    return f"has {len(pattern)} characters; at most {MAX_PATTERN} are allowed"


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except RecursionError:
        return "maximum recursion depth exceeded"
    except (re.error, OverflowError) as error:
        return str(error)
    return ""


async def _compile_in_child(patterns: Sequence[str]) -> list[str]:
    """As `_compiled`, in a short-lived process."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _CODE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, _ = await child.communicate(json.dumps(list(patterns)).encode())
        problems: list[Any] = json.loads(out)
    except (TimeoutError, ValueError):
        return ["takes too long, or too much memory, to compile"] * len(patterns)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return list(map(str, problems))
