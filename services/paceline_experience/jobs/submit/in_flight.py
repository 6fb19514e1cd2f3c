"""Submissions that may take longer than a request: they go on, and equal requests share one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.errors import ConflictError, PacelineError, PendingError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.types import Job

_WAIT_S = 20.0  # clients wait for 30 s
_KEEP_S = 120.0  # for how long a failure waits for its request to come again
log = Log("submissions")


@dataclass(frozen=True, slots=True)
class _Copying:
    text: str  # of the spec
    task: asyncio.Task[Job]


class InFlight:
    """One task for each request, which ends when the job is submitted, not when a call is."""

    def __init__(self, *, wait_s: float = _WAIT_S, keep_s: float = _KEEP_S) -> None:
        self._wait_s = wait_s
        self._keep_s = keep_s
        self._pending: dict[tuple[str, str], _Copying] = {}  # by tenant and request id

    def check(self, tenant: str, request_id: str, text: str) -> None:
        """Raise `ConflictError` if the request is submitting a spec with another text."""
        pending = self._pending.get((tenant, request_id))
        if pending is None or pending.task.done():
            return
        if pending.text != text:
            raise ConflictError(
                f"request_id {request_id!r} is submitting another spec; use a new request_id"
            )

    async def share(
        self,
        tenant: str,
        request_id: str,
        text: str,
        make: Callable[[], Coroutine[Any, Any, Job]],
    ) -> Job:
        """The job that `make` submits, which is called once for equal requests at a time.

        Raises:
            ConflictError: the request is submitting another spec.
            PendingError: it takes longer than a request may, and goes on; repeat the request.
            PacelineError: as `make` raises.
        """
        self.check(tenant, request_id, text)
        key = (tenant, request_id)
        pending = self._pending.get(key)
        if pending is None or pending.text != text:  # or another one that has failed
            task = asyncio.create_task(make(), name="submission")
            pending = self._pending[key] = _Copying(text, task)
            task.add_done_callback(partial(self._ended, key, pending))
        done, _ = await asyncio.wait({pending.task}, timeout=self._wait_s)
        if not done:
            raise PendingError(
                "fork: the checkpoint is being copied, which goes on; "
                "repeat the request with the same request_id (HTTP: Idempotency-Key)"
            )
        self._forget(key, pending)
        if pending.task.cancelled():
            raise UnavailableError("the service stops; repeat the request")
        return pending.task.result()

    def _ended(self, key: tuple[str, str], pending: _Copying, task: asyncio.Task[Job]) -> None:
        """Keep a failure for whoever asks again; of a submitted job the record tells."""
        if not task.cancelled() and (error := task.exception()) is not None:
            problem = error.message if isinstance(error, PacelineError) else repr(error)
            log.warning("cannot submit", tenant=key[0], request=key[1], error=problem)
            asyncio.get_running_loop().call_later(self._keep_s, self._forget, key, pending)
        else:
            self._forget(key, pending)

    def _forget(self, key: tuple[str, str], pending: _Copying) -> None:
        if self._pending.get(key) is pending:
            del self._pending[key]

    async def close(self) -> None:
        """End all that go on; what they leave is deleted by the next start."""
        tasks = [each.task for each in self._pending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
