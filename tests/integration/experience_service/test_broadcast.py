"""Weights go from a seed to workers along the routes of a real service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

from paceline.enums import WorkerKind
from paceline.errors import PermissionDeniedError
from paceline.platform import wire
from paceline.platform.server.membership import Membership
from paceline.platform.transport.rpc import stream
from paceline.types import Worker
from paceline.v1 import options_pb2, roster_pb2, types_pb2
from paceline.weights.route import Route
from paceline.weights.snapshot.manifest import SnapshotHeader, TensorEntry
from paceline.weights.snapshot.staging import Staging
from paceline.weights.stream.fetch_header import fetch_header
from paceline.weights.transfer.server import WeightServer
from paceline.weights.transfer.version_receiver import Receiver
from paceline_harness.patience import PATIENCE_S, call
from paceline_rollout.reports import Reports

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client, Trainer

NUM_BYTES = 8 << 20  # less than is announced, so that routes are as for more and the test is quick
LIMIT_S = PATIENCE_S


class Seed:
    """The snapshot that a trainer serves."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.trainer: Trainer = client.trainer(job_id)
        self.server = WeightServer(host="127.0.0.1")
        self.endpoint = ""
        self.job_id = job_id

    async def publish(self, step: int, *, fill: int) -> Staging:
        made = await self.trainer.seed(step, at=self.endpoint)
        header = SnapshotHeader(
            job_id=self.job_id,
            version=made.version.version,
            step=step,
            parent_version=-1,
            base_version=-1,
            incarnation=self.trainer.incarnation,
            num_bytes=NUM_BYTES,
            chunk_bytes=made.chunk_bytes,
            tensors=(TensorEntry("a", "uint8", (NUM_BYTES,), 0, NUM_BYTES),),
        )
        staging = self.server.stage(header, key=made.key, keep=-1)
        await asyncio.to_thread(staging.fill, 0, bytes([fill]) * NUM_BYTES)
        await asyncio.to_thread(staging.finish)
        return staging


class Follower:
    """A rollout worker without an engine."""

    def __init__(self, client: Client, job_id: str, name: str) -> None:
        self.name = name
        self.job_id = job_id
        self.roots: dict[int, str] = {}
        self.server = WeightServer(host="127.0.0.1")
        self._client = client
        self._endpoint = ""
        self._reports = Reports(client.roster, job_id=job_id)
        self._tasks: list[asyncio.Task[None]] = []
        self.receiver = Receiver(
            job_id=job_id,
            worker_id=name,
            server=self.server,
            report=self._reports.add,
            complete=self._complete,
        )

    async def start(self) -> None:
        self._endpoint = await self.server.start()
        member = Membership(
            roster=self._client.roster,
            report=self._report,
            progress=self.receiver.progress,
            period_s=0.2,
        )
        work = (member.run(), self.receiver.run(), self._reports.run(), self._watch())
        self._tasks = [asyncio.create_task(each) for each in work]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.close()

    async def _watch(self) -> None:
        request = roster_pb2.WatchRouteRequest(job_id=self.job_id, worker_id=self.name)
        async for route in stream(self._client.roster.WatchRoute, request, timeout_s=3600.0):
            self.receiver.route(wire.from_proto(route, Route))

    def _complete(self, staging: Staging) -> None:
        self.roots[staging.header.version] = staging.root

    def _report(self) -> Worker:
        return Worker(
            worker_id=self.name,
            kind=WorkerKind.ROLLOUT,
            endpoint="",
            site="local",
            job_id=self.job_id,
            active_version=max(self.roots, default=-1),
            weights_endpoint=self._endpoint,
        )


async def follower(client: Client, job_id: str, name: str) -> Follower:
    return Follower(await client.rollout(job_id, name), job_id, name)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_every_worker_ends_on_the_right_digest(client: Client) -> None:
    job_id = (await client.submit(eval=None)).status.job_id
    seed = Seed(client, job_id)
    workers = [await follower(client, job_id, f"w{i}") for i in range(3)]
    late = await follower(client, job_id, "w9")
    async with AsyncExitStack() as stack:
        seed.endpoint = await seed.server.start()
        stack.push_async_callback(seed.server.close)
        await seed.trainer.begin(0)
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        await until_members(client, job_id, 3)
        first = await seed.publish(0, fill=1)
        await until(lambda: all(0 in w.roots for w in workers))
        await late.start()
        stack.push_async_callback(late.stop)
        await until(lambda: 0 in late.roots)
        await seed.trainer.begin(0)  # the next incarnation publishes the same step anew
        second = await seed.publish(0, fill=2)
        await until(lambda: all(1 in w.roots for w in [*workers, late]))
        reply = await call(client.jobs.ListWeights, roster_pb2.ListWeightsRequest(job_id=job_id))
    for worker in [*workers, late]:
        assert worker.roots == {0: first.root, 1: second.root}
    assert [holder.worker_id for holder in reply.holders] == ["", "w0", "w1", "w2", "w9"]
    fed = {source.endpoint for holder in reply.holders for source in holder.sources}
    assert fed - {seed.endpoint}  # peers are asked too, not the trainer alone


async def test_peers_of_one_job_serve_nobody_of_another(client: Client) -> None:
    """What a worker is told about its own job opens no door to the weights of another."""
    jobs = [(await client.submit(eval=None)).status.job_id for _ in range(2)]
    keys: dict[str, bytes] = {}
    endpoints: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for job_id in jobs:
            seed = Seed(client, job_id)
            seed.endpoint = endpoints[job_id] = await seed.server.start()
            stack.push_async_callback(seed.server.close)
            await seed.trainer.begin(0)
            await seed.publish(0, fill=1)
            rollout = await client.rollout(job_id, "w")
            watch = roster_pb2.WatchRouteRequest(job_id=job_id, worker_id="w")
            member = Worker("w", WorkerKind.ROLLOUT, "", "local", job_id=job_id)
            joining = roster_pb2.JoinRequest(worker=wire.to_proto(member, types_pb2.Worker))
            joining.worker.weights_endpoint = "http://w"
            await call(rollout.roster.Join, joining)
            route = await anext(stream(rollout.roster.WatchRoute, watch, timeout_s=LIMIT_S))
            keys[job_id] = route.key
            await call(rollout.roster.Leave, roster_pb2.LeaveRequest(worker_id="w"))
        other, own = jobs
        fetch = partial(fetch_header, endpoints[own], job_id=own, version=0, timeout_s=LIMIT_S)
        assert (await fetch(key=keys[own])).job_id == own
        for key in (keys[other], b""):
            with pytest.raises(PermissionDeniedError, match="refuses"):
                await fetch(key=key)


async def until_members(client: Client, job_id: str, count: int) -> None:
    request = roster_pb2.ListWorkersRequest(job_id=job_id, kind=options_pb2.WORKER_KIND_ROLLOUT)
    async with asyncio.timeout(LIMIT_S):
        while len((await call(client.roster.ListWorkers, request)).workers) < count:
            await asyncio.sleep(0.02)
