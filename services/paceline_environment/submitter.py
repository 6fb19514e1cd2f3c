"""Submits finished trajectories to experience: batched, and retried until acknowledged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config.quota import MAX_TRAJECTORY_BYTES
from paceline.enums import EpisodeOutcome
from paceline.errors import (
    FencedError,
    InvalidError,
    LimitError,
    NotFoundError,
    PacelineError,
    StateError,
)
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.linger import Linger, at_once
from paceline.platform.transport.rpc import backoff_s, call
from paceline.types import Trajectory
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_environment.coalesce import Coalescer, portions

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub

_OUTCOMES = wire.members_of(EpisodeOutcome, pb.EpisodeOutcome.DESCRIPTOR)
log = Log("submitter")
_MAX_ITEMS = 256
_MAX_BYTES = 8 << 20  # per message with several trajectories, well below the limit of gRPC
_MAX_INTERNAL_ERRORS = 5  # INTERNAL answers to a single trajectory before it is given up
_TIMEOUT_S = 20.0


@dataclass(slots=True)
class _PendingSubmission:
    message: types_pb2.Trajectory
    num_bytes: int
    outcome: asyncio.Future[EpisodeOutcome]


class Submitter:
    """One queue for each job."""

    def __init__(self, *, experience: ExperienceAsyncStub, linger: Linger = at_once) -> None:
        self._experience = experience
        self._linger = linger
        self._jobs: dict[str, Coalescer[_PendingSubmission]] = {}

    async def submit(
        self, job_id: str, trajectory: Trajectory, *, soon: bool = False
    ) -> EpisodeOutcome:
        """Submit a trajectory and wait until it is acknowledged; `soon`: as in `Coalescer.put`.

        Raises:
            LimitError: it is too large to send.
            InvalidError: experience refuses this trajectory.
        """
        if job_id not in self._jobs:

            async def send(items: list[_PendingSubmission]) -> None:
                for batch in portions(
                    items, size=lambda submission: submission.num_bytes, max_size=_MAX_BYTES
                ):
                    await self._send(job_id, batch)

            self._jobs[job_id] = Coalescer(send, linger=self._linger, max_items=_MAX_ITEMS)
        message = wire.to_proto(trajectory, types_pb2.Trajectory)
        num_bytes = message.ByteSize()
        if num_bytes > MAX_TRAJECTORY_BYTES:
            raise LimitError(
                f"limit trajectory_bytes: {num_bytes} bytes, and no tenant is allowed more than "
                f"{MAX_TRAJECTORY_BYTES}; make the episodes shorter"
            )
        outcome: asyncio.Future[EpisodeOutcome] = asyncio.get_running_loop().create_future()
        self._jobs[job_id].put(_PendingSubmission(message, num_bytes, outcome), soon=soon)
        return await outcome

    def close(self) -> None:
        """Stop; episodes that are not acknowledged are leased to another worker."""
        for job in self._jobs.values():
            job.close()

    async def _send(self, job_id: str, batch: list[_PendingSubmission]) -> None:
        attempt = internal = 0
        request = pb.SubmitRequest(job_id=job_id, trajectories=[w.message for w in batch])
        while True:
            try:
                reply = await call(
                    self._experience.Submit, request, timeout_s=_TIMEOUT_S, idempotent=True
                )
                return _settle(batch, [_OUTCOMES[number] for number in reply.outcomes])
            except FencedError as error:
                log.warning("experience fenced, retrying", job=job_id, error=error)
            except (NotFoundError, StateError) as error:
                log.warning("job has ended, trajectories dropped", job=job_id, error=error)
                return _settle(batch, [EpisodeOutcome.DROPPED] * len(batch))
            except InvalidError as error:
                return await self._one_by_one(job_id, batch, error)
            except PacelineError as error:
                log.warning("cannot submit", job=job_id, num=len(batch), error=error)
                # INTERNAL maps to the root class: one of the trajectories may crash the server.
                internal += type(error) is PacelineError
                if internal >= _MAX_INTERNAL_ERRORS:
                    return await self._one_by_one(job_id, batch, InvalidError(str(error)))
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    async def _one_by_one(
        self, job_id: str, batch: list[_PendingSubmission], error: InvalidError
    ) -> None:
        """Send each alone, so that an invalid trajectory does not block the others."""
        if len(batch) == 1:
            if not batch[0].outcome.done():
                batch[0].outcome.set_exception(error)
            return
        for waiting in batch:
            await self._send(job_id, [waiting])


def _settle(batch: list[_PendingSubmission], outcomes: list[EpisodeOutcome]) -> None:
    if len(outcomes) != len(batch):
        raise PacelineError(f"{len(batch)} trajectories came back with {len(outcomes)} outcomes")
    for waiting, outcome in zip(batch, outcomes, strict=True):
        if not waiting.outcome.done():
            waiting.outcome.set_result(outcome)
