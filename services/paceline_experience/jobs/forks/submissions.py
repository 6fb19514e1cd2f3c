"""Submissions that may take longer than a request: they go on, and equal requests share one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.config import JobSpec
from paceline.errors import ConflictError, PacelineError, PendingError, UnavailableError
from paceline.telemetry.logs import Log
from paceline.types import Job

_WAIT_S = 20.0  # clients wait for 30 s
_KEEP_S = 120.0  # for how long a failure waits for its request to come again
log = Log("submissions")


@dataclass(frozen=True, slots=True)
class _Submission:
    spec: str
    task: asyncio.Task[Job]


class Submissions:
    """One task for each request, which ends when the job is submitted, not when a call is."""

    def __init__(self, *, wait_s: float = _WAIT_S, keep_s: float = _KEEP_S) -> None:
        self._wait_s = wait_s
        self._keep_s = keep_s
        self._found: dict[tuple[str, str], _Submission] = {}

    def check(self, spec: JobSpec, request_id: str) -> None:
        """Raise `ConflictError` if the request is submitting another spec."""
        found = self._found.get((spec.tenant, request_id))
        if found is None or found.task.done():
            return
        if found.spec != spec.model_dump_json():
            raise ConflictError(
                f"request_id {request_id!r} is submitting another spec; use a new request_id"
            )

    async def submit(
        self, spec: JobSpec, request_id: str, make: Callable[[], Coroutine[Any, Any, Job]]
    ) -> Job:
        """The job that `make` submits, which is called once for equal requests at a time.

        Raises:
            ConflictError: the request is submitting another spec.
            PendingError: it takes longer than a request may, and goes on; repeat the request.
            PacelineError: as `make` raises.
        """
        self.check(spec, request_id)
        key, text = (spec.tenant, request_id), spec.model_dump_json()
        found = self._found.get(key)
        if found is None or found.spec != text:  # or another one that has failed
            task = asyncio.create_task(make(), name="submission")
            found = self._found[key] = _Submission(text, task)
            task.add_done_callback(partial(self._ended, key, found))
        done, _ = await asyncio.wait({found.task}, timeout=self._wait_s)
        if not done:
            raise PendingError(
                "fork: the checkpoint is being copied, which goes on; "
                "repeat the request with the same request_id (HTTP: Idempotency-Key)"
            )
        self._forget(key, found)
        if found.task.cancelled():
            raise UnavailableError("the service stops; repeat the request")
        return found.task.result()

    def _ended(self, key: tuple[str, str], found: _Submission, task: asyncio.Task[Job]) -> None:
        """Of a job that was submitted the record tells; a failure is kept for who asks again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            told = error.message if isinstance(error, PacelineError) else repr(error)
            log.warning("cannot submit", tenant=key[0], request=key[1], error=told)
            asyncio.get_running_loop().call_later(self._keep_s, self._forget, key, found)
        else:
            self._forget(key, found)

    def _forget(self, key: tuple[str, str], found: _Submission) -> None:
        if self._found.get(key) is found:
            del self._found[key]

    async def close(self) -> None:
        """End all that go on; what they leave is deleted by the next start."""
        tasks = [each.task for each in self._found.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
