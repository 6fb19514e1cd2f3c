"""Compiles regular expressions of job files in a child process with limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import paceline
from paceline.errors import BusyError
from paceline.isolation.calls import EndedError
from paceline.isolation.once import call_once
from paceline.isolation.process import PlainProcess, bare_command

MAX_PATTERN = 2_000
# Wall clock; of CPU time the child has two seconds.
TIMEOUT_S = 10.0
# An ASCII pattern of this length compiles within milliseconds. Slow are classes of many
# characters: ten milliseconds each if case is ignored.
_SHORT = 1_000
_WIDE = re.compile(r"\\[xuUN]")
_QUEUE_TIMEOUT_S = 10.0
_MAX_CHILDREN = 4
_MODULE = "paceline_gateway.submit.patterns_child"
_FOLDERS = (Path(paceline.__file__ or "").parents[1], Path(__file__).parents[2])

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
    command = bare_command(_MODULE, *_FOLDERS)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            child = await PlainProcess.start(command, stderr=asyncio.subprocess.DEVNULL)
            answer = await call_once(child, "compile", {"patterns": list(patterns)})
    except (TimeoutError, EndedError):
        return ["takes too long, or too much memory, to compile"] * len(patterns)
    return list(map(str, answer.fields["problems"]))
