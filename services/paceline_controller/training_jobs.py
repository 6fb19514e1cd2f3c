"""`TrainingJob` objects as a second door to jobs: submitted at the gateway, mirrored, cancelled."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    PacelineError,
    QuotaError,
    StateError,
    UnavailableError,
)
from paceline.logs import Log
from paceline.rpc import backoff_s, call
from paceline.types import JobState
from paceline.v1 import jobs_pb2, types_pb2
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
from paceline_controller.training_job_status import (
    FINALIZER,
    Step,
    held,
    mirrored,
    next_step,
    rejected,
    released,
)

if TYPE_CHECKING:
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

PERIOD_S = 2.0
MOST_PAUSE_S = 30.0
TIMEOUT_S = 30.0
AT_ONCE = 16
log = Log("training_jobs")


class Api(Protocol):
    """What is needed of the Kubernetes API."""

    async def patch(
        self, kind: Kind, name: str, changes: Object, *, subresource: str = ""
    ) -> Object:
        """Merge changes into an object; a `resourceVersion` in them must still be the present."""
        ...


class Workers(Protocol):
    """What the cluster knows of the pods of a job."""

    def waits_for(self, job_id: str) -> str:
        """What keeps them from starting."""
        ...

    def rollouts_of(self, job_id: str) -> int:
        """Rollout workers that answer."""
        ...


@dataclass(slots=True)
class _Turn:
    """When an object is looked at again."""

    due_s: float = 0.0
    attempt: int = 0


class TrainingJobs:
    """Brings every object on by one step at a time; all it knows is in the objects and the ledger.

    `uid` of the object is the request id of its job, so a submission whose answer was lost finds
    the same job again.
    """

    def __init__(
        self,
        *,
        api: Api,
        cache: Cache,
        gateway: JobsAsyncStub,
        workers: Workers,
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
        self._turns: dict[str, _Turn] = {}
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Objects have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; without such objects in the cluster it asks ever more rarely."""
        attempt = 0
        while True:
            try:
                await self.once()
            except UnavailableError as error:
                log.info("TrainingJobs are not known", error=error)
                await asyncio.sleep(backoff_s(attempt, most_s=MOST_PAUSE_S))
                attempt += 1
                continue
            attempt = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S / 4):
                    await self._changed.wait()
            self._changed.clear()

    async def once(self) -> None:
        """Every object that is due takes one step.

        Raises:
            UnavailableError: the cluster has not told of its objects for too long.
        """
        found = {uid_of(body): body for body in self._cache.objects()}
        self._turns = {uid: self._turns.get(uid) or _Turn() for uid in found}
        limit = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(
            *(self._turn(body, self._turns[uid], limit) for uid, body in found.items())
        )

    async def _turn(self, body: Object, turn: _Turn, limit: asyncio.Semaphore) -> None:
        if self._clock() < turn.due_s:
            return
        async with limit:
            try:
                step = next_step(body)
                await self._take(step, body)
            except ConflictError:
                turn.due_s = self._clock() + PERIOD_S / 4  # by then the cache has the newer one
            except PacelineError as error:
                self._put_off(turn)
                log.warning("not brought on", object=name_of(body), error=error)
            except Exception:  # the supervisor boundary of one object
                self._put_off(turn)
                log.exception("not brought on", object=name_of(body))
            else:
                turn.attempt = 0
                turn.due_s = self._clock() + (PERIOD_S if step is Step.MIRROR else 0.0)

    def _put_off(self, turn: _Turn) -> None:
        pause_s = backoff_s(turn.attempt, base_s=PERIOD_S, most_s=MOST_PAUSE_S)
        turn.attempt, turn.due_s = turn.attempt + 1, self._clock() + pause_s

    async def _take(self, step: Step, body: Object) -> None:
        if step is Step.HOLD:
            await self._patch(body, held(body))
        elif step is Step.SUBMIT:
            await self._submit(body)
        elif step is Step.MIRROR:
            await self._mirror(body)
        elif step is Step.CANCEL:
            await self._cancel(body)
        elif step is Step.RELEASE:
            await self._patch(body, released(body))

    async def _submit(self, body: Object) -> None:
        spec = {"name": name_of(body), **body["spec"]}
        request = jobs_pb2.SubmitJobRequest(spec_json=json.dumps(spec), request_id=uid_of(body))
        try:
            job = await self._call(self._gateway.SubmitJob, request)
        except (InvalidError, ConflictError) as error:
            log.info("rejected", object=name_of(body), error=error)
            self._tell(body, "Rejected", error.message, warning=True)
            await self._write(body, rejected(body, error.message, now=self._now()))
            return
        except QuotaError as error:  # it is tried again, and people want to know why it takes long
            self._tell(body, "QuotaUsed", error.message, warning=True)
            raise
        log.info("submitted", object=name_of(body), job=job.status.job_id)
        self._tell(body, "Submitted", f"job {job.status.job_id}")
        await self._write(body, self._seen(body, job))

    async def _mirror(self, body: Object) -> None:
        request = jobs_pb2.GetJobRequest(job_id=body["status"]["jobId"])
        try:
            job = await self._call(self._gateway.GetJob, request)
        except NotFoundError:
            if deleting(body):
                await self._patch(body, released(body))
                return
            self._tell(body, "Lost", f"job {request.job_id} is unknown", warning=True)
            raise
        status = self._seen(body, job)
        if JobState(job.status.state).terminal:
            over = job.status.state.capitalize()
            failed = job.status.state == JobState.FAILED
            self._tell(body, over, job.status.reason or "the job is over", warning=failed)
        await self._write(body, status)

    async def _cancel(self, body: Object) -> None:
        """Ask for the end, then mirror until it has come."""
        job_id = body["status"]["jobId"]
        request = jobs_pb2.CancelJobRequest(job_id=job_id, reason="its TrainingJob was deleted")
        try:
            job = await self._call(self._gateway.CancelJob, request)
        except NotFoundError:
            await self._patch(body, released(body))
        except StateError:  # it is over already
            await self._mirror(body)
        else:
            await self._write(body, self._seen(body, job))

    def _seen(self, body: Object, job: types_pb2.Job) -> Object:
        job_id = job.status.job_id
        before = body.get("status") or {}
        try:
            rollouts, waits = self._workers.rollouts_of(job_id), self._workers.waits_for(job_id)
        except PacelineError:  # not known at the moment
            rollouts, waits = before.get("rolloutReplicas", 0), before.get("reason", "")
        return mirrored(body, job, rollouts=rollouts, waits_for=waits, now=self._now())

    async def _write(self, body: Object, status: Object) -> None:
        if status != (body.get("status") or {}):
            await self._patch(body, {"status": status}, subresource="status")

    async def _patch(self, body: Object, changes: Object, *, subresource: str = "") -> None:
        """Only if the object is still as it was looked at."""
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

    def _tell(self, body: Object, reason: str, note: str, *, warning: bool = False) -> None:
        self._events.tell("", reason, note, warning=warning, about=reference(body))

    async def _call(self, method: Any, request: Any) -> types_pb2.Job:
        return await call(method, request, timeout_s=TIMEOUT_S)
