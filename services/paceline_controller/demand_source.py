"""Where workers and demand are read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.platform import wire
from paceline.platform.transport.rpc import call
from paceline.types import Worker
from paceline.v1 import experience_pb2, roster_pb2

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class JobDemand:
    """The work of a live job, according to its ledger."""

    job_id: str = ""
    queued: int = 0  # episodes
    leased: int = 0
    ready_groups: int = 0
    headroom_groups: int = 0  # that admission would still allow
    trainer_wait_s: float = 0.0  # how long the trainer has waited for its current batch
    step: int = 0
    accepted_groups: int = 0  # ready or later, and not dropped
    sampled_tokens: int = 0  # by the policy, in all finished episodes, evaluations included
    measuring: bool = False  # an evaluation is in progress
    group_size: int = 0  # mean of the last groups
    failed_attempts: int = 0  # of episodes, since the ledger was opened
    last_failure: str = ""  # what the newest of them failed on
    filtered: dict[str, int] = field(default_factory=dict[str, int])  # dropped groups by reason
    eval_open: int = 0  # tasks of the evaluation in progress that have no result yet
    eval_version: int = 0  # that it measures
    eval_tasks: int = 0  # that it has
    disagreement: str = ""  # rollout workers that the trainer does not agree with; empty: none


class DemandSource(Protocol):
    """The source of workers and demand: the experience service."""

    async def workers(self) -> Sequence[Worker]:
        """All workers in the roster."""
        ...

    async def demand(self) -> Mapping[str, JobDemand]:
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

    async def demand(self) -> dict[str, JobDemand]:
        """Demand of each live job."""
        request = experience_pb2.DemandRequest()
        reply = await call(self._experience.Demand, request, timeout_s=TIMEOUT_S)
        return {job.job_id: wire.from_proto(job, JobDemand) for job in reply.jobs}
