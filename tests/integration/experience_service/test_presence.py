"""When episodes are leased again; leases do not expire in these tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.enums import EpisodeOutcome, JobState, WorkerKind
from paceline.platform import wire
from paceline.platform.server.membership import Membership
from paceline.platform.transport.rpc import connect
from paceline.types import Worker
from paceline.v1 import experience_pb2 as ex
from paceline.v1 import options_pb2, roster_pb2, types_pb2
from paceline_harness.patience import call

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client
    from paceline_harness.experience_service.serving import Lives

MOMENT_S = 0.05


class Stream:
    """A scripted lease stream of a worker."""

    def __init__(self, client: Client, worker_id: str) -> None:
        self._worker_id = worker_id
        self._told: asyncio.Queue[ex.LeaseRequest] = asyncio.Queue()
        self._replies = client.lease(self._requests())

    def say(self, **fields: object) -> None:
        message = ex.LeaseRequest(**fields)  # pyright: ignore[reportArgumentType]
        self._told.put_nowait(message)

    def hello(self, credits: int, *holds: ex.EpisodeKey) -> None:
        self.say(
            worker_id=self._worker_id, credits=credits, renew=list(holds), renew_is_complete=True
        )

    async def assigned(self) -> types_pb2.Assignment:
        """The next assignment; each arrives in its own message."""
        (given,) = (await anext(self._replies)).assignments
        return given

    async def again(self, before: types_pb2.Assignment) -> types_pb2.Assignment:
        """Another worker's episodes; new groups may arrive first, until its death is noticed."""
        while True:
            for given in (await anext(self._replies)).assignments:
                if given.group_id == before.group_id:
                    return given
            self.say(credits=2)

    async def aborted(self) -> list[ex.EpisodeKey]:
        return list((await anext(self._replies)).abort)

    async def ended(self) -> None:
        async for _ in self._replies:
            pass

    async def _requests(self) -> AsyncIterator[ex.LeaseRequest]:
        while True:
            yield await self._told.get()


@asynccontextmanager
async def worker(client: Client, worker_id: str) -> AsyncGenerator[Stream]:
    """A stream on its own connection, which breaks at the end, as if its process were killed."""
    async with connect(client.address) as channel:
        yield Stream(type(client)(channel, client.address), worker_id)


async def begun(client: Client) -> str:
    job_id = (await client.submit(eval=None)).status.job_id
    trainer = client.trainer(job_id)
    await trainer.begin(0)
    await trainer.publish_version(0)
    return job_id


def keys(given: types_pb2.Assignment) -> list[ex.EpisodeKey]:
    return [
        ex.EpisodeKey(job_id=given.job_id, group_id=given.group_id, index=i, attempt=a)
        for i, a in zip(given.indices, given.attempts, strict=True)
    ]


async def submit(client: Client, given: types_pb2.Assignment) -> list[str]:
    made = [client.trajectory(given, place) for place in range(len(given.indices))]
    request = ex.SubmitRequest(job_id=given.job_id, trajectories=made)
    reply = await call(client.experience.Submit, request)
    known = wire.members_of(EpisodeOutcome, ex.EpisodeOutcome.DESCRIPTOR)
    return [known[number] for number in reply.outcomes]


async def test_a_stream_that_breaks_gives_its_episodes_to_others(
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path, lease_return_s=MOMENT_S) as client:
        job_id = await begun(client)
        async with worker(client, "b") as other:
            async with worker(client, "a") as killed:
                killed.hello(2)
                given = await killed.assigned()
            other.hello(2)
            again = await other.again(given)
            assert list(again.attempts) == [2, 2]
            # A worker that was only cut off comes back: it is told to stop, and does no harm.
            async with worker(client, "a") as back:
                back.hello(0, *keys(given))
                assert await back.aborted() == keys(given)
                assert await submit(client, again) == ["accepted"] * 2
                assert await submit(client, given) == ["superseded"] * 2
        await client.verify(job_id)


async def test_a_new_stream_reports_the_leases_of_its_worker(
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path) as client:
        job_id = await begun(client)
        async with worker(client, "a") as older, worker(client, "a") as newer:
            older.hello(2)
            kept = await older.assigned()
            older.say(credits=2)
            lost = await older.assigned()
            newer.hello(2, *keys(kept))
            again = await newer.again(lost)
            assert list(again.attempts) == [2, 2]
            await older.ended()
            assert await submit(client, kept) == ["accepted"] * 2
        await client.verify(job_id)


async def test_a_worker_without_heartbeats_loses_its_leases_and_stream(
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path, member_lease_s=MOMENT_S) as client:
        await begun(client)
        async with worker(client, "a") as frozen, worker(client, "b") as other:
            frozen.hello(2)
            given = await frozen.assigned()
            frozen.say(credits=8)  # nothing may come back to it
            mine = types_pb2.Worker(
                worker_id="a", kind=options_pb2.WORKER_KIND_ENVIRONMENT, endpoint="a:1"
            )
            await call(client.roster.Join, roster_pb2.JoinRequest(worker=mine))
            await frozen.ended()
            other.hello(2)
            assert list((await other.again(given)).attempts) == [2, 2]


async def test_workers_that_died_while_the_service_was_away(
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path) as client:
        await begun(client)
        async with worker(client, "a") as killed:
            killed.hello(2)
            given = await killed.assigned()
    later = lives(store_url, tmp_path, lease_return_s=MOMENT_S)
    async with later as client, worker(client, "b") as other:
        other.hello(2)
        assert list((await other.again(given)).attempts) == [2, 2]


async def test_a_worker_hears_of_the_end_of_each_job_it_keeps_however_long_ago(
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path) as client:
        over, live = await begun(client), await begun(client)
        await client.set_state(over, JobState.FAILED)
    heard: list[str] = []

    async def ended(job_id: str) -> None:
        heard.append(job_id)

    async with lives(store_url, tmp_path) as client:  # remembers no end that is new
        worker = Worker(worker_id="w", kind=WorkerKind.ENVIRONMENT, endpoint="")
        kept = [over, live, "never"]
        member = Membership(
            roster=client.roster, report=lambda: worker, ended=ended, kept=lambda: kept
        )
        await member.join()
        await member.beat()
        assert sorted(heard) == sorted([over, "never"])
        await member.beat()
        assert len(heard) == 2  # not asked again with every heartbeat
