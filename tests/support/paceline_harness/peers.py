"""Fake peers of an environment worker on real gRPC: experience, rollout and reward."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio

from paceline.enums import Purpose, ScoreStatus
from paceline.platform import wire
from paceline.platform.transport.rpc import SERVER_OPTIONS
from paceline.types import Assignment, Trajectory, Worker
from paceline.v1 import experience_pb2, jobs_pb2, reward_pb2, rollout_pb2, roster_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import ExperienceServicer, add_ExperienceServicer_to_server
from paceline.v1.jobs_pb2_grpc import JobsServicer, add_JobsServicer_to_server
from paceline.v1.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from paceline.v1.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from paceline.v1.roster_pb2_grpc import RosterServicer, add_RosterServicer_to_server

_ACCEPTED = experience_pb2.EPISODE_OUTCOME_ACCEPTED
_DUPLICATE = experience_pb2.EPISODE_OUTCOME_DUPLICATE


class FakePeer:
    """A gRPC server on a loopback port."""

    def __init__(self) -> None:
        self.server: aio.Server | None = None
        self.address = ""
        self.load: dict[str, float] = {}  # as reported in the roster

    async def start(self, address: str = "127.0.0.1:0") -> None:
        """Serve; pass `address` to reuse it after `stop`."""
        self.server = aio.server(options=SERVER_OPTIONS)
        self.add_to(self.server)
        port = self.server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    def add_to(self, server: aio.Server) -> None:
        """Register its services."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop serving and abort all streams."""
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    @asynccontextmanager
    async def away(self) -> AsyncGenerator[None]:
        """Stop serving until the block ends, then resume at the same address."""
        await self.stop()
        host, _, port = self.address.rpartition(":")
        with socket.socket() as kept:  # bound, so that the port stays reserved
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((host, int(port)))
            yield
            await self.start(self.address)


class FakeExperience(FakePeer, JobsServicer, ExperienceServicer, RosterServicer):
    """Leases `work` against credits and stores the results."""

    def __init__(self, *, spec: str, files: dict[str, bytes]) -> None:
        super().__init__()
        self.work: list[Assignment] = []
        self.workers: list[Worker] = []
        self.trajectories: dict[tuple[str, int], Trajectory] = {}
        self.num_submits = 0
        self.refused: set[tuple[str, int]] = set()
        self.raw: list[types_pb2.Trajectory] | None = None  # if set, stores messages unconverted
        self.given_back: list[experience_pb2.EpisodeKey] = []
        self.progress: list[types_pb2.EpisodeProgress] = []
        self.renewed: list[experience_pb2.EpisodeKey] = []
        self.ended_jobs: list[str] = []
        self.hellos: list[experience_pb2.LeaseRequest] = []
        self.aborts: list[experience_pb2.EpisodeKey] = []
        self.joined: list[types_pb2.Worker] = []
        self.more = asyncio.Event()
        self._spec = spec
        self.files = {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        self._artifacts = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self._others: dict[str, dict[str, str]] = {}  # files of other models, by job

    def add_model(self, job_id: str, files: dict[str, bytes]) -> None:
        """Give a job a model of its own."""
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self._others[job_id] = digests
        self.files.update({digests[name]: data for name, data in files.items()})

    def add_to(self, server: aio.Server) -> None:
        """Register three services on one port."""
        add_JobsServicer_to_server(self, server)
        add_ExperienceServicer_to_server(self, server)
        add_RosterServicer_to_server(self, server)

    def give(self, assignments: Iterable[Assignment]) -> None:
        """Queue work."""
        self.work.extend(assignments)
        self.more.set()

    def abort(self, key: experience_pb2.EpisodeKey) -> None:
        """Abort an episode."""
        self.aborts.append(key)
        self.more.set()

    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: object) -> types_pb2.Job:
        """Return the same job for every id, but for its model."""
        artifacts = self._others.get(request.job_id, self._artifacts)
        status = types_pb2.JobStatus(job_id=request.job_id, state=types_pb2.JOB_STATE_RUNNING)
        return types_pb2.Job(status=status, spec_json=self._spec, artifacts=artifacts)

    async def GetArtifact(
        self, request: experience_pb2.GetArtifactRequest, context: object
    ) -> AsyncIterator[experience_pb2.ArtifactChunk]:
        """Send the artifact in two chunks."""
        data = self.files[request.digest]
        yield experience_pb2.ArtifactChunk(data=data[:100])
        yield experience_pb2.ArtifactChunk(data=data[100:])

    async def Lease(
        self, request_iterator: AsyncIterator[experience_pb2.LeaseRequest], context: object
    ) -> AsyncIterator[experience_pb2.LeaseReply]:
        """Lease work against credits."""
        credit = {Purpose.TRAIN: 0, Purpose.EVAL: 0}
        ended = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, credit, ended))
        try:
            while not ended.is_set():
                self.more.clear()
                ready: list[types_pb2.Assignment] = []
                while self.work and credit[self.work[0].purpose] >= len(self.work[0].indices):
                    found = self.work.pop(0)
                    credit[found.purpose] -= len(found.indices)
                    ready.append(wire.to_proto(found, types_pb2.Assignment))
                aborts, self.aborts = self.aborts, []
                if ready or aborts:
                    yield experience_pb2.LeaseReply(assignments=ready, abort=aborts)
                await self.more.wait()
        finally:
            reader.cancel()

    async def _read(
        self,
        requests: AsyncIterator[experience_pb2.LeaseRequest],
        credit: dict[Purpose, int],
        ended: asyncio.Event,
    ) -> None:
        async for request in requests:
            if request.worker_id:
                self.hellos.append(request)
            credit[Purpose.TRAIN] += request.credits
            credit[Purpose.EVAL] += request.eval_credits
            self.given_back.extend(request.give_back)
            self.progress.extend(request.progress)
            self.renewed.extend(request.renew)
            self.more.set()
        ended.set()
        self.more.set()

    async def Submit(
        self, request: experience_pb2.SubmitRequest, context: aio.ServicerContext[Any, Any]
    ) -> experience_pb2.SubmitReply:
        """Accept each trajectory once."""
        self.num_submits += 1
        if any((m.group_id, m.index) in self.refused for m in request.trajectories):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused by the test")
        if self.raw is not None:
            self.raw.extend(request.trajectories)
            return experience_pb2.SubmitReply(outcomes=[_ACCEPTED] * len(request.trajectories))
        outcomes: list[experience_pb2.EpisodeOutcome.ValueType] = []
        for message in request.trajectories:
            known = (message.group_id, message.index) in self.trajectories
            outcomes.append(_DUPLICATE if known else _ACCEPTED)
            noun = wire.from_proto(message, Trajectory)
            self.trajectories[noun.group_id, noun.index] = noun
        return experience_pb2.SubmitReply(outcomes=outcomes)

    async def Join(self, request: roster_pb2.JoinRequest, context: object) -> roster_pb2.JoinReply:
        """Accept any worker."""
        self.joined.append(request.worker)
        return roster_pb2.JoinReply(lease_s=6)

    async def Heartbeat(
        self, request: roster_pb2.HeartbeatRequest, context: object
    ) -> roster_pb2.HeartbeatReply:
        """Accept the heartbeat, and name the jobs that have ended."""
        return roster_pb2.HeartbeatReply(ended_jobs=self.ended_jobs)

    async def Leave(
        self, request: roster_pb2.LeaveRequest, context: object
    ) -> roster_pb2.LeaveReply:
        """Accept the departure."""
        return roster_pb2.LeaveReply()

    async def WatchWorkers(
        self, request: roster_pb2.ListWorkersRequest, context: object
    ) -> AsyncIterator[roster_pb2.ListWorkersReply]:
        """Stream `workers`, polled frequently."""
        last: list[Worker] = []
        while True:
            found = [
                worker for worker in self.workers if wire.number_of(worker.kind) == request.kind
            ]
            if found != last:
                messages = [wire.to_proto(worker, types_pb2.Worker) for worker in found]
                yield roster_pb2.ListWorkersReply(workers=messages)
                last = found
            await asyncio.sleep(0.05)


Speak = Callable[[int, int], int]


class FakeRollout(FakePeer, RolloutServicer):
    """Samples `speak(seed, position)`: the same tokens on every worker, as real engines do."""

    def __init__(self, *, speak: Speak, version: int = 0, pause_s: float = 0.0) -> None:
        super().__init__()
        self.version = version
        self.pause_s = pause_s
        self.burst = False  # send a complete answer in one event
        self.gone = False  # reject pinned requests
        self.single = False  # freeze after every token
        self.frozen = asyncio.Event()
        self.frozen.set()
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.num_batches = 0
        self.num_tokens = 0
        self.aborted: list[str] = []
        self.speak = speak

    def add_to(self, server: aio.Server) -> None:
        """One service."""
        add_RolloutServicer_to_server(self, server)

    async def Status(
        self, request: rollout_pb2.RolloutStatusRequest, context: object
    ) -> rollout_pb2.RolloutStatus:
        """Report its status."""
        return rollout_pb2.RolloutStatus(engine="fake", precision="float32")

    async def Generate(
        self, request_iterator: AsyncIterator[rollout_pb2.GenerateBatch], context: object
    ) -> AsyncIterator[rollout_pb2.GenerateEvents]:
        """Emit a token for every running request, then pause."""
        running: dict[str, list[Any]] = {}
        more = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, running, more))
        try:
            while True:
                await self.frozen.wait()
                events = [self._advance(name, running) for name in list(running)]
                if events and self.single:
                    self.frozen.clear()
                if events:
                    yield rollout_pb2.GenerateEvents(events=events)
                if running:
                    await asyncio.sleep(self.pause_s)
                else:
                    more.clear()
                    await more.wait()
        finally:
            reader.cancel()

    async def _read(
        self,
        batches: AsyncIterator[rollout_pb2.GenerateBatch],
        running: dict[str, list[Any]],
        more: asyncio.Event,
    ) -> None:
        async for batch in batches:
            self.num_batches += 1
            self.requests.extend(batch.requests)
            self.aborted.extend(batch.abort)
            for name in batch.abort:
                running.pop(name, None)
            for request in batch.requests:
                running[request.request_id] = [request, 0]
            more.set()

    def _advance(self, name: str, running: dict[str, list[Any]]) -> rollout_pb2.GenerateEvent:
        request, said = running[name]
        if request.min_version > self.version or (self.gone and request.pinned_version >= 0):
            del running[name]
            return rollout_pb2.GenerateEvent(
                request_id=name,
                finish_reason=rollout_pb2.FINISH_REASON_ERROR,
                error_code="FAILED_PRECONDITION",
            )
        tokens: list[int] = []
        finish = rollout_pb2.FINISH_REASON_UNSPECIFIED
        while not finish and (self.burst or not tokens):
            position = len(request.tokens) + said + len(tokens)
            tokens.append(self.speak(request.sampling.seed, position))
            if tokens[-1] in request.sampling.stop_tokens:
                finish = rollout_pb2.FINISH_REASON_STOP
            elif said + len(tokens) >= request.sampling.max_tokens:
                finish = rollout_pb2.FINISH_REASON_LENGTH
        running[name][1] = said + len(tokens)
        self.num_tokens += len(tokens)
        if finish:
            del running[name]
        return rollout_pb2.GenerateEvent(
            request_id=name,
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            versions=[types_pb2.VersionRun(version=self.version, count=len(tokens))],
            finish_reason=finish,
        )


class FakeReward(FakePeer, RewardServicer):
    """Scores with the environment's reward; can be slow, hang or fail."""

    def __init__(self, *, hang: bool = False, status: str = "ok", pause_s: float = 0.0) -> None:
        super().__init__()
        self.hang = hang
        self.pause_s = pause_s
        self.status = status
        self.num_calls = 0
        self.items: list[reward_pb2.ScoreItem] = []

    def add_to(self, server: aio.Server) -> None:
        """One service."""
        add_RewardServicer_to_server(self, server)

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: object
    ) -> reward_pb2.ScoreReply:
        """Return one score per item."""
        self.num_calls += 1
        self.items.extend(request.items)
        if self.hang:
            await asyncio.Event().wait()
        await asyncio.sleep(self.pause_s)
        scores = [
            types_pb2.Score(
                reward=item.environment_reward,
                status=wire.number_of(ScoreStatus(self.status)),
            )
            for item in request.items
        ]
        return reward_pb2.ScoreReply(scores=scores)
