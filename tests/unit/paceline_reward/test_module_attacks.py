"""Callers of a reward worker that name functions of modules; each would leave a file behind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from grpc import aio

from paceline.errors import InvalidError
from paceline.platform.fair_queue import FairQueue
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor, call, connect
from paceline.v1 import reward_pb2 as pb
from paceline.v1 import types_pb2
from paceline.v1.reward_pb2_grpc import RewardStub, add_RewardServicer_to_server
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.scorer import Scorer
from paceline_reward.servicer import RewardServicer

if TYPE_CHECKING:
    from paceline.v1.reward_pb2_grpc import RewardAsyncStub

HERE = Path(__file__).parent / "functions"


def logging_that_runs(program: str) -> dict[str, Any]:
    """A configuration of `logging.config` whose factory of a formatter is `os.system`."""
    return {"version": 1, "formatters": {"x": {"()": "os.system", "command": program}}}


def attacks(deed: Path) -> list[dict[str, Any]]:
    """Parts that make the file `deed` if their functions are called, or imported."""
    run = {"log_config": logging_that_runs(f"touch {deed}")}
    module = {"path": str(deed)}
    return [
        {"kind": "uvicorn:run", **run},
        {"kind": "python", "function": "uvicorn:run", **run},
        {"kind": "leaves_a_file:score", **module},
        {"kind": "python", "function": "leaves_a_file:score", **module},
        {"kind": "python", "function": "leaves_a_file:score\n", **module},
        {"kind": "python", "function": " leaves_a_file:score", **module},
        {"kind": "python", "name": "exact", "function": "leaves_a_file:score", **module},
    ]


@pytest.fixture
async def worker() -> AsyncIterator[RewardAsyncStub]:
    """A reward worker whose operator has listed nothing."""
    pool = ChildPool(plain_children([HERE]), FairQueue(1))
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())], options=SERVER_OPTIONS)
    servicer = RewardServicer(scorer=Scorer(pool=pool), metrics=Metrics())
    add_RewardServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}")
    yield RewardStub(channel)
    await channel.close()
    await server.stop(None)
    await pool.close()


@pytest.mark.parametrize("number", range(7))
async def test_no_caller_has_a_function_called(
    worker: RewardAsyncStub, tmp_path: Path, number: int
) -> None:
    deed = tmp_path / "deed"
    part = attacks(deed)[number]
    item = pb.ScoreItem(episode_id="g/0", task=types_pb2.Task(task_id="t", payload="{}"))
    refused = False
    for code in ("", "0" * 64):  # of which the worker has none
        rewards = json.dumps([part])
        request = pb.ScoreRequest(rewards_json=rewards, items=[item], code=code)
        try:
            reply = await call(worker.Score, request, timeout_s=120.0)
            assert reply.scores[0].status == types_pb2.SCORE_STATUS_INFRA_ERROR
        except InvalidError:
            refused = True
        assert not deed.exists()
    assert refused


NAMES = [
    "os:system",
    "subprocess:run",
    "builtins:eval",
    "builtins:exec",
    "builtins:__import__",
    "logging.config:dictConfig",
    "pydoc:locate",
    "importlib:import_module",
    "paceline.plugins.loading:attribute",
    "paceline.rewards.exact:exact",  # the target of a plug-in is no name of it
    "paceline_reward.child:main",
    "json:dumps",
    "os:path.join",
    "os.path:join",
    "os::system",
    "os:system:",
    ":system",
    "os:",
    ":",
    " os:system",
    "os:system ",
    "os :system",
    "os:system\n",
    "\tos:system",
    "os\u200b:system",
    "\uff4f\uff53:system",  # full-width letters
    "os\uff1asystem",  # a full-width colon
    "\u043es:system",  # a Cyrillic letter
    "os:system\x00",
    ".os:system",
    "..paceline:errors",
    "os:__dict__",
    "exact:exact",
    "exact ",
    "Exact",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", ["kind", "function"])
async def test_no_other_name_is_accepted(name: str, by: str) -> None:
    scorer = Scorer(pool=ChildPool(plain_children(), FairQueue(1)))
    part = {"kind": name} if by == "kind" else {"kind": "python", "function": name}
    with pytest.raises(InvalidError):
        await scorer.score(json.dumps([part]), [])
