from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from grpc import aio

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError, InvalidError
from paceline.isolation.sandbox import landlock
from paceline.platform import wire
from paceline.platform.server.chassis import Chassis, serve
from paceline.platform.transport.rpc import SERVER_OPTIONS, connect
from paceline.plugins import RewardInput
from paceline.types import Task
from paceline.v1 import reward_pb2 as pb
from paceline.v1 import roster_pb2, roster_pb2_grpc, types_pb2
from paceline.v1.options_pb2 import WORKER_KIND_REWARD
from paceline.v1.reward_pb2_grpc import RewardStub
from paceline_harness.patience import PATIENCE_S, call
from paceline_reward.service import RewardService, build

if TYPE_CHECKING:
    from paceline.v1.reward_pb2_grpc import RewardAsyncStub

MakeItem = Callable[..., RewardInput]


class Roster(roster_pb2_grpc.RosterServicer):
    """Remembers who came, beat and left."""

    def __init__(self) -> None:
        self.joined: list[roster_pb2.JoinRequest] = []
        self.beats: list[roster_pb2.HeartbeatRequest] = []
        self.left: list[str] = []

    async def Join(self, request: roster_pb2.JoinRequest, context: Any) -> roster_pb2.JoinReply:
        self.joined.append(request)
        return roster_pb2.JoinReply(lease_s=6.0)

    async def Heartbeat(
        self, request: roster_pb2.HeartbeatRequest, context: Any
    ) -> roster_pb2.HeartbeatReply:
        self.beats.append(request)
        return roster_pb2.HeartbeatReply()

    async def Leave(self, request: roster_pb2.LeaveRequest, context: Any) -> roster_pb2.LeaveReply:
        self.left.append(request.worker_id)
        return roster_pb2.LeaveReply()

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def WatchWorkers(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def PublishVersion(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def WatchRoute(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ReportTransfer(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


class Running:
    """A reward service on loopback, and the roster it joins."""

    def __init__(self, chassis: Chassis, roster: Roster) -> None:
        self.chassis = chassis
        self.roster = roster
        channel = connect(chassis.address)
        self.channel = channel
        self.stub: RewardAsyncStub = RewardStub(channel)


def settings_for(experience: str, tmp_path: Path, **options: Any) -> ServiceSettings:
    return ServiceSettings(
        kind=WorkerKind.REWARD,
        worker_id="reward-0",
        experience=experience,
        run_dir=tmp_path,
        grace_s=60.0,
        insecure=True,
        options=options,
    )


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    roster = Roster()
    server = aio.server(options=SERVER_OPTIONS)
    roster_pb2_grpc.add_RosterServicer_to_server(roster, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made: asyncio.Future[Chassis] = asyncio.get_running_loop().create_future()

    async def note(chassis: Chassis) -> RewardService:
        made.set_result(chassis)
        return await build(chassis)

    serving = asyncio.create_task(serve(settings_for(f"127.0.0.1:{port}", tmp_path), note))
    service = Running(await made, roster)
    yield service
    await service.channel.close()
    (await made).stop()
    assert await serving == 0
    assert roster.left == ["reward-0"]
    await server.stop(None)


async def score(running: Running, items: list[RewardInput], rewards: str) -> pb.ScoreReply:
    messages = [
        pb.ScoreItem(
            episode_id=item.episode_id,
            task=wire.to_proto(item.task, types_pb2.Task),
            response_text=item.response,
            environment_reward=item.environment_reward,
        )
        for item in items
    ]
    request = pb.ScoreRequest(job_id="j", rewards_json=rewards, items=messages)
    return await call(running.stub.Score, request, timeout_s=PATIENCE_S, idempotent=True)


async def test_scores_in_the_order_of_the_items(running: Running, item: MakeItem) -> None:
    parts = json.dumps([{"kind": "exact"}, {"kind": "environment", "weight": 0.5}])
    items = [item("42", environment_reward=1.0), item("4"), item("42")]
    reply = await score(running, items, parts)
    assert [each.reward for each in reply.scores] == [1.5, 0.0, 1.0]
    assert dict(reply.scores[0].parts) == {"exact": 1.0, "environment": 1.0}
    assert reply.scores[0].status == types_pb2.SCORE_STATUS_OK


@pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")
async def test_programs_run_in_its_sandbox(running: Running) -> None:
    tests = {"inputs": ["20 22"], "outputs": ["42"]}
    task = Task(task_id="t", environment="e", payload=json.dumps({"tests": tests}))
    programs = ("print(sum(map(int, input().split())))", "import os; os.kill(os.getppid(), 9)")
    items = [
        RewardInput(episode_id=f"g/{n}", task=task, response=r) for n, r in enumerate(programs)
    ]
    reply = await score(running, [*items, items[0]], '[{"kind": "code"}]')
    assert [each.reward for each in reply.scores] == [1.0, 0.0, 1.0]
    assert "PermissionError" in reply.scores[1].detail


async def test_an_unknown_reward_lists_the_installed(running: Running, item: MakeItem) -> None:
    with pytest.raises(InvalidError, match="rewards: 'exakt' is not installed; installed: code"):
        await score(running, [item("42")], '[{"kind": "exakt"}]')


async def test_joins_and_reports_its_load(running: Running, item: MakeItem) -> None:
    await score(running, [item("42")] * 3, '[{"kind": "exact"}]')
    while not running.roster.beats or running.roster.beats[-1].load["scored"] < 3:
        await asyncio.sleep(0.05)
    worker = running.roster.joined[0].worker
    assert (worker.kind, worker.endpoint, worker.job_id) == (
        WORKER_KIND_REWARD,
        running.chassis.address,
        "",
    )
    assert set(running.roster.beats[-1].load) == {"pending", "scored", "busy_s", "cpu_s"}


async def test_bad_options_name_the_field(tmp_path: Path) -> None:
    settings = settings_for("", tmp_path, processes=0)
    with pytest.raises(ConfigError, match=r"processes: .* \(got 0\)"):
        await serve(settings, build)
