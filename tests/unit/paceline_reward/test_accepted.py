"""Functions that are listed, and those of jobs that are older than the list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from paceline.errors import NotFoundError, UnlistedError
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor, connect
from paceline.plugins import RewardInput
from paceline.plugins.allowed import AllowedTargets
from paceline.v1 import jobs_pb2, jobs_pb2_grpc, types_pb2
from paceline_reward.accepted import AcceptedTargets
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.scorer import Scorer

HERE = Path(__file__).parent / "functions"
LISTED = AllowedTargets.of(["leaves_a_file:score"])
MakeItem = Callable[..., RewardInput]


class Records(jobs_pb2_grpc.JobsServicer):
    """Experience with one job that may name a function that is not listed."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: Any) -> types_pb2.Job:
        self.asked.append(request.job_id)
        if request.job_id == "old":
            return types_pb2.Job(status=types_pb2.JobStatus(unlisted=["leaves_a_file:sibling"]))
        if request.job_id == "new":
            return types_pb2.Job()
        raise NotFoundError(f"job {request.job_id!r} is not known")


@pytest.fixture
def records() -> Records:
    return Records()  # pyright: ignore[reportAbstractUsage]


@pytest.fixture
async def accepted(records: Records) -> AsyncIterator[AcceptedTargets]:
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())], options=SERVER_OPTIONS)
    jobs_pb2_grpc.add_JobsServicer_to_server(records, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}")
    yield AcceptedTargets(jobs_pb2_grpc.JobsStub(channel))
    await channel.close()
    await server.stop(None)


@pytest.fixture
async def scorer(accepted: AcceptedTargets) -> AsyncIterator[Scorer]:
    pool = ChildPool(plain_children([HERE]), FairQueue(1))
    yield Scorer(pool=pool, allowed=LISTED, accepted=accepted.of)
    await pool.close()


def section(function: str, path: Path) -> str:
    return json.dumps([{"kind": f"leaves_a_file:{function}", "path": str(path)}])


async def test_a_listed_function_is_called_and_its_module_lists_nothing_else(
    scorer: Scorer, item: MakeItem, tmp_path: Path
) -> None:
    (score,) = await scorer.score(section("score", tmp_path / "a"), [item("")])
    assert score.reward == 1.0
    for name in ("sibling", "Path", "annotations"):
        with pytest.raises(UnlistedError, match="listed: leaves_a_file:score; installed"):
            await scorer.score(section(name, tmp_path / "b"), [item("")])
    assert not (tmp_path / "b").exists()


async def test_only_the_job_that_was_accepted_before_may_name_what_it_named(
    scorer: Scorer, records: Records, item: MakeItem, tmp_path: Path
) -> None:
    async def ask(job: str, function: str) -> float:
        rewards = section(function, tmp_path / job)
        (score,) = await scorer.score(rewards, [item("")], owner=QueueOwner("t", job))
        return score.reward

    for job in ("new", "unknown", ""):
        with pytest.raises(UnlistedError):
            await ask(job, "sibling")
    assert await asyncio.gather(ask("old", "sibling"), ask("old", "sibling")) == [1.0, 1.0]
    for job in ("new", "unknown", ""):  # what is remembered of one job helps no other
        with pytest.raises(UnlistedError):
            await ask(job, "sibling")
    with pytest.raises(UnlistedError):
        await ask("old", "Path")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert "" not in records.asked


async def test_a_job_that_is_over_is_forgotten(accepted: AcceptedTargets, records: Records) -> None:
    assert "leaves_a_file:sibling" in await accepted.of("old")
    assert accepted.jobs == {"old"}
    await accepted.of("old")
    assert records.asked == ["old"]
    accepted.end("old")
    assert accepted.jobs == set()
