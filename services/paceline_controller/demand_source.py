"""Where workers and demand are read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from paceline import wire
from paceline.transport.rpc import call
from paceline.types import Worker
from paceline.v1 import experience_pb2, roster_pb2

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

TIMEOUT_S = 2.0


class DemandSource(Protocol):
    """Where workers and demand are read from: the experience service."""

    async def workers(self) -> Sequence[Worker]:
        """All workers in the roster."""
        ...

    async def demand(self) -> Mapping[str, experience_pb2.JobDemand]:
        """Demand of each live job."""
        ...


class GrpcDemandSource:
    """A `DemandSource` that asks the experience service."""

    def __init__(self, *, roster: RosterAsyncStub, experience: ExperienceAsyncStub) -> None:
        self._roster = roster
        self._experience = experience

    async def workers(self) -> list[Worker]:
        """All workers in the roster, with their load."""
        request = roster_pb2.ListWorkersRequest()
        reply = await call(self._roster.ListWorkers, request, timeout_s=TIMEOUT_S)
        return [wire.from_proto(worker, Worker) for worker in reply.workers]

    async def demand(self) -> dict[str, experience_pb2.JobDemand]:
        """Demand of each live job."""
        request = experience_pb2.DemandRequest()
        reply = await call(self._experience.Demand, request, timeout_s=TIMEOUT_S)
        return {job.job_id: job for job in reply.jobs}
