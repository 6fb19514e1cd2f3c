"""Who a trainer or rollout worker is: its credential is issued here, and checked on every call.

The one place for it. What each method needs follows from its callers in the protos and from the
fields of its request, so a method that is added is checked like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.enums import WorkerKind
from paceline.errors import (
    AuthenticationError,
    FencedError,
    InvalidError,
    NotFoundError,
    PermissionDeniedError,
)
from paceline.platform import wire
from paceline.platform.transport.job_credential import (
    JOB_KINDS,
    JobCredential,
    check_proof,
    claimed,
    not_issued,
    presented,
    sealed,
)
from paceline.platform.transport.operations import Operation, operations
from paceline.platform.transport.rpc_authorization import (
    RefusedCallers,
    caller_kinds,
    narrow_caller,
)
from paceline.types import Worker
from paceline.v1.experience_pb2 import GetArtifactRequest
from paceline.v1.roster_pb2 import JoinRequest
from paceline_experience.fleet.roster import Roster
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import Ledgers
from paceline_experience.store.watermarks import Watermarks


class Credentials:
    """Issues the credentials of all jobs, and refuses calls that they do not cover."""

    def __init__(
        self,
        *,
        jobs: JobStore,
        ledgers: Ledgers,
        roster: Roster,
        watermarks: Callable[[str], Watermarks],
        refusals: RefusedCallers,
    ) -> None:
        self._watermarks = watermarks
        self._jobs = jobs
        self._ledgers = ledgers
        self._roster = roster
        self._refusals = refusals

    async def issue(self, credential: JobCredential) -> str:
        """The text of a credential.

        Raises:
            NotFoundError: no job has this id.
            InvalidError: it does not name a trainer's incarnation, or a rollout worker.
            FencedError: the job has a newer incarnation, or this one was never granted.
        """
        is_trainer = credential.kind is WorkerKind.TRAINER
        if is_trainer != (credential.incarnation > 0):
            raise InvalidError("incarnation: is that of a trainer, and 0 for a rollout worker")
        secret = await self._jobs.credential_secret(credential.job_id)
        if is_trainer:
            newest = (await self._ledgers.get(credential.job_id)).incarnation
            _check_newest(credential.incarnation, newest)
        return sealed(credential, secret)

    async def check(self, method: str, context: Any, request: Any) -> None:
        """Check one call; `request` is not read if it is a stream.

        Raises:
            AuthenticationError: the credential is missing or false.
            PermissionDeniedError: it is that of another job, kind, worker or incarnation.
            FencedError: it is that of an incarnation that has been replaced.
        """
        operation, text = operations().get(method), presented(context)
        if operation is None or not (text or operation.callers & JOB_KINDS):
            return
        try:
            if not text:
                self._check_needs_none(operation, request)
                return
            credential = await self._authentic(text)
            await self._check_covers(credential, operation, request)
        except (AuthenticationError, PermissionDeniedError):
            self._refusals.add(method, caller_kinds() or frozenset())
            raise
        narrow_caller(credential.kind)

    async def _authentic(self, text: str) -> JobCredential:
        credential = claimed(text)
        try:
            secret = await self._jobs.credential_secret(credential.job_id)
        except NotFoundError:
            raise not_issued() from None
        check_proof(text, secret)
        return credential

    def _check_needs_none(self, operation: Operation, request: Any) -> None:
        kinds = caller_kinds()
        certified = kinds is not None and kinds <= JOB_KINDS
        concerned = {worker.kind for worker in self._workers_of(request)}
        if certified or operation.callers <= JOB_KINDS or concerned & JOB_KINDS:
            raise AuthenticationError(
                f"{operation.name} needs the credential of a worker of the job; it is in the file "
                "that the worker's setting `credential` names, and comes from the controller"
            )

    async def _check_covers(
        self, credential: JobCredential, operation: Operation, request: Any
    ) -> None:
        if credential.kind not in operation.callers:
            raise PermissionDeniedError(f"{credential} does not allow {operation.name}")
        _check_same(credential, "job_id", getattr(request, "job_id", None))
        _check_same(credential, "incarnation", getattr(request, "incarnation", None))
        for worker in self._workers_of(request):
            _check_same(credential, "kind", worker.kind)
            _check_same(credential, "job_id", worker.job_id)
        worker_id = _worker_id(request)
        if worker_id is not None and not credential.covers(worker_id):
            raise PermissionDeniedError(f"worker_id: {credential} is for another worker")
        if isinstance(request, GetArtifactRequest):
            await self._check_artifact(credential, request.digest)
        if credential.incarnation:
            newest = await self._newest_incarnation(credential.job_id)
            _check_newest(credential.incarnation, newest)

    async def _newest_incarnation(self, job_id: str) -> int:
        """Of the ledger, or while it is not open, of what outlives this process.

        Opening it may take long, or be impossible, and the caller may only want to say so.
        """
        ledger = self._ledgers.peek(job_id)
        if ledger is not None:
            return ledger.incarnation
        (noted,) = await self._jobs.noted(job_id, "incarnation")
        return max(int(noted or 0), self._watermarks(job_id).highest("incarnation"))

    async def _check_artifact(self, credential: JobCredential, digest: str) -> None:
        job = await self._jobs.get(credential.job_id)
        if digest not in job.artifacts.values():
            raise PermissionDeniedError(f"{credential} does not cover this artifact")

    def _workers_of(self, request: Any) -> list[Worker]:
        """The worker that joins, and the member that a request would renew, replace or remove."""
        joining = [wire.from_proto(request.worker, Worker)] if _joins(request) else []
        member = self._roster.find(_worker_id(request) or "")
        return joining if member is None else [*joining, member]


def _joins(request: Any) -> bool:
    return isinstance(request, JoinRequest)


def _worker_id(request: Any) -> str | None:
    """Of the worker that a request is about; None: of a whole job."""
    return request.worker.worker_id if _joins(request) else getattr(request, "worker_id", None)


def _check_same(credential: JobCredential, field: str, value: Any) -> None:
    if value is not None and value != getattr(credential, field):
        raise PermissionDeniedError(f"{field}: {credential} is for another one")


def _check_newest(incarnation: int, newest: int) -> None:
    if incarnation != newest:
        raise FencedError(f"incarnation {incarnation} is not the newest, which is {newest}")
