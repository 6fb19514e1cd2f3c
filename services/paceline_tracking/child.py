"""Starts a tracker process and sends it requests with a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from subprocess import PIPE
from typing import Any

from paceline.isolation.calls import CallError, Calls, EndedError
from paceline.isolation.process import PlainProcess, command
from paceline_tracking.secrets import without_secrets

COMMAND = command("paceline_tracking.host")
MOST_WORDS = 2000


class TrackerError(Exception):
    """A tracker failed a request; `reason`: hung, crashed or refused."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class TrackerProcess:
    """One tracker process; it must be replaced after any error."""

    def __init__(self, process: PlainProcess) -> None:
        self.pid = process.pid
        self._calls = Calls(process)
        self.kill = self._calls.kill

    @classmethod
    async def start(cls, command: Sequence[str] = COMMAND) -> TrackerProcess:
        """Start the process in a session of its own."""
        return cls(await PlainProcess.start(command, stderr=PIPE))

    async def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """The answer to one request, a verb with what it is given.

        Raises:
            TrackerError: it timed out, has exited, or returned an error.
        """
        ((verb, given),) = request.items()
        try:
            async with asyncio.timeout(timeout_s):
                return (await self._calls.call(verb, {"given": given})).fields
        except TimeoutError:
            raise TrackerError("hung", f"no answer to {verb} in {timeout_s:g} s") from None
        except CallError as error:
            raise TrackerError("refused", error.message) from None
        except EndedError as error:
            detail = f"ended with {error.how}" if error.how else error.message
            raise TrackerError("crashed", without_secrets(detail)[:MOST_WORDS]) from None
