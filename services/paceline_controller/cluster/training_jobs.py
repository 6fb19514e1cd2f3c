"""Submits `TrainingJob` objects as jobs to the gateway, and mirrors their status.

What is asked of an object (`spec.suspend`, its deletion) is asked of its job. An object goes with
its job: when that is deleted, by somebody or after its time to live, the object is deleted too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from paceline.enums import JobState
from paceline.errors import (
    ConflictError,
    DeletedError,
    InvalidError,
    NotFoundError,
    PacelineError,
    QuotaError,
    StateError,
    UnavailableError,
)
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import backoff_s, call
from paceline.types import Job
from paceline.v1 import jobs_pb2
from paceline_controller.cluster.training_job_status import (
    FINALIZER,
    NextStep,
    held,
    mirrored,
    next_step,
    rejected,
    released,
    unmade,
)
from paceline_controller.runtimes.kubernetes.events import Events, reference
from paceline_controller.runtimes.kubernetes.resources import (
    TRAINING_JOBS,
    Kind,
    Object,
    deleting,
    name_of,
    uid_of,
)
from paceline_controller.runtimes.kubernetes.watches import Cache

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

PERIOD_S = 2.0
MAX_PAUSE_S = 30.0
OVER_PERIOD_S = 30.0  # at most, between two looks whether the job of one that is over still exists
TIMEOUT_S = 30.0
AT_ONCE = 16
log = Log("training_jobs")


class TrainingJobApi(Protocol):
    """The part of the Kubernetes API that `TrainingJobs` uses."""

    async def patch(
        self, kind: Kind, name: str, changes: Object, *, subresource: str = ""
    ) -> Object:
        """Merge changes into an object; a `resourceVersion` in them must be current."""
        ...

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:
        """Delete an object; no error if it is gone or has another `uid`."""
        ...


class JobPods(Protocol):
    """The pods of jobs."""

    def waits_for(self, job_id: str) -> str:
        """The reason why pods of a job do not start; empty: there is none."""
        ...

    def rollouts_of(self, job_id: str) -> int:
        """Number of ready rollout workers."""
        ...


@dataclass(slots=True)
class _Backoff:
    """When an object is processed next."""

    due_s: float = 0.0
    attempt: int = 0
    looks: int = 0  # whether its job, which is over, still exists

    def period_s(self, step: NextStep) -> float:
        """Until the step after this one, which has succeeded."""
        if step is NextStep.OUTLIVE:  # more often at first: a deletion begins with the end of a job
            self.looks = min(self.looks + 1, 10)
            return min(OVER_PERIOD_S, PERIOD_S * 1.5**self.looks)
        return PERIOD_S if step is NextStep.MIRROR else 0.0


class TrainingJobs:
    """Advances every object one step at a time; all state is in the objects and the ledger.

    The `uid` of an object is the request id of its job, so that repeating a submission whose answer
    was lost finds the same job.
    """

    def __init__(
        self,
        *,
        api: TrainingJobApi,
        cache: Cache,
        gateway: JobsAsyncStub,
        workers: JobPods,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._cache = cache
        self._gateway = gateway
        self._workers = workers
        self._events = events
        self._clock = clock
        self._now = now
        self._backoffs: dict[str, _Backoff] = {}
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Objects have changed: process them now."""
        self._changed.set()

    async def run(self) -> None:
        """Process objects until cancelled; backs off while the kind is not installed."""
        attempt = 0
        while True:
            try:
                await self.once()
            except UnavailableError as error:
                log.info("TrainingJobs are not known", error=error)
                await asyncio.sleep(backoff_s(attempt, max_s=MAX_PAUSE_S))
                attempt += 1
                continue
            attempt = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S / 4):
                    await self._changed.wait()
            self._changed.clear()

    async def once(self) -> None:
        """Advance every object that is due by one step.

        Raises:
            UnavailableError: the cache is stale.
        """
        bodies = {uid_of(body): body for body in self._cache.objects()}
        self._backoffs = {uid: self._backoffs.get(uid) or _Backoff() for uid in bodies}
        limit = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(
            *(self._process(body, self._backoffs[uid], limit) for uid, body in bodies.items())
        )

    async def _process(self, body: Object, backoff: _Backoff, limit: asyncio.Semaphore) -> None:
        if self._clock() < backoff.due_s:
            return
        async with limit:
            try:
                step = next_step(body)
                await self._take(step, body)
            except ConflictError:
                backoff.due_s = self._clock() + PERIOD_S / 4  # by then the cache has the newer one
            except PacelineError as error:
                self._defer(backoff)
                log.warning("cannot advance", object=name_of(body), error=error)
            except Exception:  # the supervisor boundary of one object
                self._defer(backoff)
                log.exception("cannot advance", object=name_of(body))
            else:
                backoff.attempt = 0
                backoff.due_s = self._clock() + backoff.period_s(step)

    def _defer(self, backoff: _Backoff) -> None:
        pause_s = backoff_s(backoff.attempt, base_s=PERIOD_S, max_s=MAX_PAUSE_S)
        backoff.attempt, backoff.due_s = backoff.attempt + 1, self._clock() + pause_s

    async def _take(self, step: NextStep, body: Object) -> None:
        if step is NextStep.HOLD:
            await self._patch(body, held(body))
        elif step is NextStep.SUBMIT:
            await self._submit(body)
        elif step is NextStep.MIRROR:
            await self._mirror(body)
        elif step is NextStep.CANCEL:
            await self._cancel(body)
        elif step in (NextStep.PAUSE, NextStep.RESUME):
            await self._suspend(body, step)
        elif step is NextStep.RELEASE:
            await self._patch(body, released(body))
        elif step is NextStep.OUTLIVE:
            await self._outlive(body)

    async def _submit(self, body: Object) -> None:
        asked = {name: value for name, value in body["spec"].items() if name != "suspend"}
        spec = {"name": name_of(body), **asked}
        request = jobs_pb2.SubmitJobRequest(spec_json=json.dumps(spec), request_id=uid_of(body))
        try:
            job = await self._call(self._gateway.SubmitJob, request)
        except DeletedError:
            await self._delete(body)
            return
        except (InvalidError, ConflictError) as error:
            log.info("rejected", object=name_of(body), error=error)
            self._record(body, "Rejected", error.message, warning=True)
            await self._write(body, rejected(body, error.message, now=self._now()))
            return
        except NotFoundError as error:
            if "fork" not in asked:
                raise
            log.info("failed", object=name_of(body), error=error)
            self._record(body, "Failed", error.message, warning=True)
            await self._write(body, unmade(body, error.message, now=self._now()))
            return
        except QuotaError as error:  # retried, with an event to say why it takes long
            self._record(body, "QuotaUsed", error.message, warning=True)
            raise
        log.info("submitted", object=name_of(body), job=job.status.job_id)
        self._record(body, "Submitted", f"job {job.status.job_id}")
        await self._write(body, self._status_of(body, job))

    async def _mirror(self, body: Object) -> None:
        request = jobs_pb2.GetJobRequest(job_id=body["status"]["jobId"])
        try:
            job = await self._call(self._gateway.GetJob, request)
        except NotFoundError:
            await self._miss(body)
            return
        status = self._status_of(body, job)
        state = job.status.state
        if state.terminal:
            text = job.status.reason or "the job is over"
            failed = state is JobState.FAILED
            self._record(body, state.capitalize(), text, warning=failed)
        await self._write(body, status)

    async def _miss(self, body: Object) -> None:
        """Its job is unknown, although it was not over when it was last seen."""
        if deleting(body):
            await self._patch(body, released(body))
        elif body["status"].get("state") == JobState.CANCELLING:
            await self._delete(body)  # `paceline delete --force`, which cancels first
        else:  # deleted, which its request tells; or lost, as a store came from an older backup
            self._record(body, "Lost", f"job {body['status']['jobId']} is unknown", warning=True)
            await self._submit(body)

    async def _outlive(self, body: Object) -> None:
        request = jobs_pb2.GetJobRequest(job_id=body["status"]["jobId"])
        try:
            await self._call(self._gateway.GetJob, request)
        except NotFoundError:
            await self._delete(body)

    async def _delete(self, body: Object) -> None:
        job_id = (body.get("status") or {}).get("jobId", "")
        self._record(body, "Deleted", f"job {job_id} was deleted")
        await self._api.delete(TRAINING_JOBS, name_of(body), uid=uid_of(body))
        log.info("deleted", object=name_of(body), job=job_id)

    async def _cancel(self, body: Object) -> None:
        """Cancel the job; its end is mirrored later."""
        job_id = body["status"]["jobId"]
        request = jobs_pb2.CancelJobRequest(job_id=job_id, reason="its TrainingJob was deleted")
        try:
            job = await self._call(self._gateway.CancelJob, request)
        except NotFoundError:
            await self._patch(body, released(body))
        except StateError:  # already over
            await self._mirror(body)
        else:
            await self._write(body, self._status_of(body, job))

    async def _suspend(self, body: Object, step: NextStep) -> None:
        job_id, reason = body["status"]["jobId"], "spec.suspend of its TrainingJob"
        try:
            if step is NextStep.PAUSE:
                request = jobs_pb2.PauseJobRequest(job_id=job_id, reason=reason)
                job = await self._call(self._gateway.PauseJob, request)
            else:
                request = jobs_pb2.ResumeJobRequest(job_id=job_id)
                job = await self._call(self._gateway.ResumeJob, request)
        except (StateError, NotFoundError):  # it has ended, or is about to
            await self._mirror(body)
            return
        self._record(body, "Suspended" if step is NextStep.PAUSE else "Resumed", f"job {job_id}")
        await self._write(body, self._status_of(body, job))

    def _status_of(self, body: Object, job: Job) -> Object:
        job_id = job.status.job_id
        before = body.get("status") or {}
        try:
            rollouts, waits = self._workers.rollouts_of(job_id), self._workers.waits_for(job_id)
        except PacelineError:  # unknown at present
            rollouts, waits = before.get("rolloutReplicas", 0), before.get("reason", "")
        return mirrored(body, job, rollouts=rollouts, waits_for=waits, now=self._now())

    async def _write(self, body: Object, status: Object) -> None:
        if status != (body.get("status") or {}):
            await self._patch(body, {"status": status}, subresource="status")

    async def _patch(self, body: Object, changes: Object, *, subresource: str = "") -> None:
        """Patch an object, if it has not changed since it was read."""
        metadata = {
            **changes.get("metadata", {}),
            "resourceVersion": body["metadata"]["resourceVersion"],
        }
        changed = await self._api.patch(
            TRAINING_JOBS, name_of(body), {**changes, "metadata": metadata}, subresource=subresource
        )
        if changed["metadata"].get("deletionTimestamp") and FINALIZER not in (
            changed["metadata"].get("finalizers") or ()
        ):
            self._cache.forget(changed)
        else:
            self._cache.learn(changed)

    def _record(self, body: Object, reason: str, note: str, *, warning: bool = False) -> None:
        self._events.record("", reason, note, warning=warning, about=reference(body))

    async def _call(self, method: Any, request: Any) -> Job:
        return wire.from_proto(await call(method, request, timeout_s=TIMEOUT_S), Job)
