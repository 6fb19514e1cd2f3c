"""Asks a job's own code for what will be needed, while its ledger goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from paceline.errors import InvalidError, UnavailableError
from paceline.platform.telemetry.logs import Log

_RETRY_S = 1.0
log = Log("own-code")


class AskedAhead:
    """Calls until there is enough; tries again what is no fault of the job."""

    def __init__(
        self,
        call: Callable[[], Awaitable[bool]],
        *,
        failed: Callable[[InvalidError], None],
        name: str,
    ) -> None:
        """`call` returns whether to call again; `failed` is told of what ends the job."""
        self._call = call
        self._failed = failed
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def begin(self) -> None:
        """Go on in the background, unless it does."""
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name=self._name)

    def close(self) -> None:
        """Ask for nothing more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                if not await self._call():
                    return
            except InvalidError as error:
                self._failed(error)
                return
            except UnavailableError as error:
                log.warning("the job's code cannot be asked yet", what=self._name, error=error)
                await asyncio.sleep(_RETRY_S)
            except Exception:  # the supervisor boundary of what this job draws
                log.exception("the job's code cannot be asked yet", what=self._name)
                await asyncio.sleep(_RETRY_S)
