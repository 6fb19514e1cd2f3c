"""Clients of the service that act as users, trainers and workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    suppress,
)
from typing import TYPE_CHECKING, Any

from grpc import aio

from paceline.enums import JobState, StopReason, WorkerKind
from paceline.platform import wire
from paceline.platform.transport.rpc import connect, stream
from paceline.v1 import experience_pb2 as ex
from paceline.v1 import jobs_pb2, roster_pb2, types_pb2
from paceline.v1.access_pb2_grpc import AccessStub, AuthenticationStub
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.v1.tenants_pb2_grpc import TenantsStub
from paceline_harness.lifecycle.workers import trajectory
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import AccessAsyncStub, AuthenticationAsyncStub
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub
    from paceline.v1.tenants_pb2_grpc import TenantsAsyncStub


SOURCE = "http://trainer"


LIMIT_S = PATIENCE_S


class Client:
    """All stubs of one running service."""

    def __init__(self, channel: aio.Channel, address: str = "") -> None:
        self.address = address
        self._workers: list[aio.Channel] = []
        self.jobs: JobsAsyncStub = JobsStub(channel)
        self.experience: ExperienceAsyncStub = ExperienceStub(channel)
        self.roster: RosterAsyncStub = RosterStub(channel)
        self.tenants: TenantsAsyncStub = TenantsStub(channel)
        self.access: AccessAsyncStub = AccessStub(channel)
        self.authentication: AuthenticationAsyncStub = AuthenticationStub(channel)

    async def submit(
        self, request_id: str = "", *, config: bytes = b"{}", **changes: Any
    ) -> types_pb2.Job:
        request = jobs_pb2.SubmitJobRequest(
            spec_json=json.dumps(make_spec(**changes)),
            request_id=request_id,
            files={"config.json": config},
        )
        return await call(self.jobs.SubmitJob, request)

    async def get(self, job_id: str) -> types_pb2.Job:
        return await call(self.jobs.GetJob, jobs_pb2.GetJobRequest(job_id=job_id))

    async def set_state(self, job_id: str, state: JobState) -> types_pb2.Job:
        request = ex.SetJobStateRequest(job_id=job_id, state=wire.number_of(state))
        return await call(self.experience.SetJobState, request)

    async def verify(self, job_id: str) -> jobs_pb2.VerificationReport:
        report = await call(self.jobs.VerifyJob, jobs_pb2.VerifyJobRequest(job_id=job_id))
        assert report.ok, report.problems
        return report

    async def watch(self, job_id: str) -> list[jobs_pb2.JobEvent]:
        request = jobs_pb2.WatchJobRequest(job_id=job_id)
        return [e async for e in stream(self.jobs.WatchJob, request, timeout_s=LIMIT_S)]

    @staticmethod
    def trajectory(given: types_pb2.Assignment, place: int) -> types_pb2.Trajectory:
        """The trajectory of an episode of an assignment."""
        return trajectory(given, place)

    async def credential(
        self, job_id: str, kind: WorkerKind, worker: str, incarnation: int = 0
    ) -> str:
        request = ex.IssueCredentialRequest(
            job_id=job_id, kind=wire.number_of(kind), worker=worker, incarnation=incarnation
        )
        return (await call(self.experience.IssueCredential, request)).credential

    def acting(self, credential: str) -> Client:
        """The same service, called with a credential; none if it is empty."""
        channel = connect(self.address, token=credential)
        self._workers.append(channel)
        return Client(channel, self.address)

    async def rollout(self, job_id: str, name: str) -> Client:
        """The same service, called as a rollout worker of a job."""
        return self.acting(await self.credential(job_id, WorkerKind.ROLLOUT, name))

    async def close(self) -> None:
        """End the connections of workers."""
        for channel in self._workers:
            await channel.close()

    def trainer(self, job_id: str) -> Trainer:
        """A new trainer of a job."""
        return Trainer(self, job_id)

    def environment(self) -> AbstractAsyncContextManager[None]:
        """A worker that completes every episode."""
        return environment(self)

    async def lease(self, requests: AsyncIterator[ex.LeaseRequest]) -> AsyncIterator[ex.LeaseReply]:
        async for reply in self.experience.Lease(requests, timeout=LIMIT_S):
            yield reply


class Trainer:
    """Makes the calls of a trainer."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._controller = client
        self._client = client
        self._job_id = job_id
        self.incarnation = 0

    async def grant(self) -> None:
        grant = ex.GrantIncarnationRequest(job_id=self._job_id)
        reply = await call(self._controller.experience.GrantIncarnation, grant)
        await self.be(reply.incarnation)

    async def be(self, incarnation: int) -> None:
        """Act as an incarnation that was granted before."""
        name = f"trainer-{self._job_id}"
        credential = await self._controller.credential(
            self._job_id, WorkerKind.TRAINER, name, incarnation
        )
        self._client, self.incarnation = self._controller.acting(credential), incarnation

    @property
    def client(self) -> Client:
        """The service, called as this incarnation."""
        return self._client

    async def begin(self, step: int) -> int:
        await self.grant()
        experience = self._client.experience
        request = ex.RewindRequest(job_id=self._job_id, incarnation=self.incarnation, step=step)
        return (await call(experience.Rewind, request)).parent_version

    async def publish_version(self, step: int) -> int:
        return (await self.seed(step)).version.version

    async def seed(
        self,
        step: int,
        *,
        at: str = SOURCE,
        part: int = 0,
        parts: int = 1,
        digest: str = "",
        parent: int = -1,
    ) -> roster_pb2.PublishVersionReply:
        """Announce one part of a step."""
        request = roster_pb2.PublishVersionRequest(
            job_id=self._job_id,
            incarnation=self.incarnation,
            step=step,
            parent=parent,
            weights_endpoint=at,
            num_bytes=64 << 20,
            part=part,
            parts=parts,
            digest=digest,
        )
        return await call(self._client.roster.PublishVersion, request)

    async def take(self, step: int, *, rank: int = 0, world: int = 1) -> list[ex.BatchPart]:
        request = ex.TakeBatchRequest(
            job_id=self._job_id, incarnation=self.incarnation, step=step, rank=rank, world=world
        )
        parts = stream(self._client.experience.TakeBatch, request, timeout_s=LIMIT_S)
        return [part async for part in parts]

    async def commit(self, step: int, batch_id: str) -> ex.CommitStepReply:
        request = ex.CommitStepRequest(
            job_id=self._job_id,
            incarnation=self.incarnation,
            step=step,
            batch_id=batch_id,
            metrics={"loss": 1.0 / (step + 1)},
        )
        return await call(self._client.experience.CommitStep, request)

    async def commit_checkpoint(self, step: int) -> None:
        request = ex.CommitCheckpointRequest(
            job_id=self._job_id, incarnation=self.incarnation, step=step, path="p"
        )
        await call(self._client.experience.CommitCheckpoint, request)

    async def train(self, step: int) -> str:
        """Train and publish one step; returns the stop reason."""
        batch = await self.take(step)
        assert sum(len(part.samples) for part in batch) == batch[0].num_samples == 4
        reply = await self.commit(step, batch[0].batch_id)
        await self.publish_version(reply.step)
        return wire.member_of(StopReason, reply.stop, "stop") if reply.stop else ""


@asynccontextmanager
async def environment(client: Client, *, reward: float = 1.0) -> AsyncGenerator[None]:
    """Completes every leased episode immediately."""
    told: asyncio.Queue[ex.LeaseRequest] = asyncio.Queue()
    told.put_nowait(ex.LeaseRequest(worker_id="e", credits=64, eval_credits=64))

    async def requests() -> AsyncIterator[ex.LeaseRequest]:
        while True:
            yield await told.get()

    async def play() -> None:
        async for reply in client.lease(requests()):
            for given in reply.assignments:
                places = range(len(given.indices))
                made = [trajectory(given, place, eval_reward=reward) for place in places]
                request = ex.SubmitRequest(job_id=given.job_id, trajectories=made)
                await call(client.experience.Submit, request)
                free, is_eval = len(made), given.purpose == types_pb2.PURPOSE_EVAL
                message = ex.LeaseRequest(credits=0 if is_eval else free)
                message.eval_credits = free if is_eval else 0
                told.put_nowait(message)

    task = asyncio.create_task(play())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def make_spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "sums",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "eval": {"every": 2, "tasks": 3, "options": {"split": "heldout"}},
        "reward": [{"kind": "exact"}],
        "experience": {"batch_groups": 2, "group_size": 2, "max_staleness": 4, "lease_s": LIMIT_S},
        "stop": {"steps": 4},
        **changes,
    }
