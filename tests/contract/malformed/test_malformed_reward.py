"""Malformed texts in requests to a reward worker: refused by field, or scored; never its fault."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from paceline.platform.fair_queue import FairQueue
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor
from paceline.v1 import reward_pb2 as pb
from paceline.v1 import reward_pb2_grpc, types_pb2
from paceline_harness.messages.hostile_text import mutants
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.scorer import Scorer
from paceline_reward.servicer import RewardServicer

GOOD = pb.ScoreRequest(
    job_id="job",
    rewards_json=json.dumps([{"kind": "exact"}]),
    items=[
        pb.ScoreItem(
            episode_id="g/0",
            task=types_pb2.Task(
                task_id="t", environment="arithmetic", payload=json.dumps({"answer": "42"})
            ),
            response_text="42",
            turns=[pb.RewardTurn(text="42", num_tokens=1)],
            variant="plain",
            variant_meta=json.dumps({"answer": "whole"}),
        )
    ],
    tenant="a",
)


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    pool = ChildPool(plain_children([]), FairQueue(1))
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())], options=SERVER_OPTIONS)
    servicer = RewardServicer(scorer=Scorer(pool=pool), metrics=Metrics())
    reward_pb2_grpc.add_RewardServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield reward_pb2_grpc.RewardStub(channel)
    await server.stop(None)
    await pool.close()


async def status(stub: Any, request: Any) -> tuple[str, str]:
    try:
        await stub.Score(request, timeout=120)
    except aio.AioRpcError as error:
        code: grpc.StatusCode = error.code()
        return code.name, error.details() or ""
    return "OK", ""


async def test_no_text_is_the_fault_of_the_reward_worker(stub: Any) -> None:
    assert await status(stub, GOOD) == ("OK", "")
    refused: set[str] = set()
    for path, request in mutants(GOOD):
        code, text = await status(stub, request)
        assert code in {"OK", "INVALID_ARGUMENT"}, (path, code, text, str(request)[:200])
        if code == "INVALID_ARGUMENT":
            refused.add(path)
            assert path.rpartition(".")[2].removesuffix("s_json") in text, (path, text)
    assert refused == {"rewards_json", "items.variant_meta"}
    assert await status(stub, GOOD) == ("OK", "")


PARTS: list[tuple[Any, str]] = [
    ([{"kind": "exact"}, {"kind": "exact"}], "two parts are named"),
    ([{"kind": "exact", "after": ["later"]}], "which is not listed before it"),
    ([{"kind": "exact", "after": ["exact"]}], "which is not listed before it"),
    ([{"kind": "exact"}] * 33, "at most 32"),
    ([{"kind": "exact", "timeout_s": -1}], "timeout_s"),
    ([{"kind": "exact", "weight": "much"}], "weight"),
    ([{"kind": "no such reward"}], "no such reward"),
    ([{"kind": "exact", "no_such_option": {"a": [1]}}], "no_such_option"),
    ({"kind": "exact"}, "reward"),
]


@pytest.mark.parametrize(("parts", "why"), PARTS)
async def test_wrong_parts_are_refused_by_field(stub: Any, parts: Any, why: str) -> None:
    request = pb.ScoreRequest(rewards_json=json.dumps(parts), items=GOOD.items)
    code, text = await status(stub, request)
    assert (code, why in text) == ("INVALID_ARGUMENT", True), text
