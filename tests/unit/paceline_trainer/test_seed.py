"""A trainer on several nodes: each node's uplink carries its part of the weights."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.errors import StateError
from paceline.platform.transport.rpc import connect
from paceline.types import PolicyVersion
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights.canary import NO_CANARY, CanaryRule
from paceline.weights.route import ChunkSource, Route, TransferReport
from paceline.weights.snapshot.manifest import plan
from paceline.weights.snapshot.staging import Staging
from paceline.weights.transfer.http_transport import HttpTransport
from paceline.weights.transfer.version_transfer import Transfer
from paceline.weights.transport import TransportSettings
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import ON_CPU
from paceline_trainer.client import TrainerLedger
from paceline_trainer.step.model import DTYPES
from paceline_trainer.weights.publish import Publisher, WeightCopy
from paceline_trainer.weights.seeder import WeightSeeder
from paceline_trainer.weights.tensor_queue import TensorQueue

LIMIT_S = PATIENCE_S


@asynccontextmanager
async def two_nodes(forks: Any, join: Any, folder: Path) -> AsyncGenerator[None]:
    """Two ranks, each with a server of its own."""
    # As the first rank of its node, each would take GPU 0.
    ranks = forks.start_ranks(2, "seed", folder, ON_CPU)
    ended = asyncio.create_task(asyncio.to_thread(join, ranks))
    try:
        yield
    finally:
        (folder / "end").touch()
        await ended


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.02)


async def receive(one_job: Any, sources: tuple[ChunkSource, ...]) -> tuple[Staging, Counter[str]]:
    """Pull the first version from these; what came, and how many bytes from whom."""
    came: Counter[str] = Counter()

    def note(report: TransferReport) -> None:
        came[report.endpoint] += report.num_bytes

    transfer = Transfer(
        Route(PolicyVersion(0, 0), sources, key=one_job.key),
        job_id="j",
        stage=lambda header: Staging(header, key=one_job.key),
        report=note,
    )
    return await asyncio.wait_for(transfer.run(), LIMIT_S), came


@pytest.mark.parametrize(
    "engine", ["bfloat16", pytest.param("float32", marks=pytest.mark.extended)]
)
async def test_the_uplinks_of_two_nodes_add_up(
    one_job: Any,
    llama: Path,
    forks: Any,
    join_ranks: Any,
    scores_of: Any,
    tmp_path: Path,
    engine: str,
) -> None:
    """In float32 the sharded policy itself is compared with the reference, else copies of it."""
    job = {"path": str(llama), "experience": one_job.address, "engine": engine}
    (tmp_path / "job.json").write_text(json.dumps(job))
    async with two_nodes(forks, join_ranks, tmp_path):
        await until(lambda: one_job.versions and one_job.seeds)
        first, second = one_job.versions[0].weights_endpoint, one_job.seeds[0].weights_endpoint
        assert (one_job.seeds[0].part, one_job.seeds[0].parts) == (1, 2)
        both, came = await receive(one_job, (ChunkSource(first, 0, 2), ChunkSource(second, 1, 2)))
        alone, _ = await receive(one_job, (ChunkSource(first),))
    assert both.root == alone.root != ""
    sizes = [end - start for start, end in map(both.header.chunk_range, range(both.num_ready))]
    assert came == {first: sum(sizes[::2]), second: sum(sizes[1::2])}
    dtype = DTYPES[engine]
    expected = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    for entry, data in both.tensors():
        found = torch.frombuffer(data, dtype=dtype).view(entry.shape)
        assert torch.equal(found, expected[entry.name].to(dtype)), entry.name
    canary, rounded = both.header.canary, AutoModelForCausalLM.from_pretrained(llama)
    rounded.load_state_dict({name: value.to(dtype) for name, value in expected.items()})
    verdict = CanaryRule().verdict(canary, scores_of(rounded, canary))
    assert verdict.difference < 1e-5
    assert (canary.noise > 1e-3) == (engine == "bfloat16")


def snapshot(step: int, *, shape: tuple[int, ...] = (8, 1024)) -> WeightCopy:
    entries, num_bytes = plan([("a", "float32", shape)])
    tensors = TensorQueue()
    tensors.put("a", torch.ones(shape))
    tensors.end()
    return WeightCopy(step, entries, num_bytes, (), NO_CANARY, tensors)


@pytest.fixture
async def nodes(one_job: Any) -> AsyncIterator[tuple[Publisher, WeightSeeder, HttpTransport]]:
    """Rank 0 and a further node in one process."""
    channel = connect(one_job.address)
    ledger = TrainerLedger(
        experience=ExperienceStub(channel),
        roster=RosterStub(channel),
        jobs=JobsStub(channel),
        job_id="j",
        incarnation=0,
    )
    servers = [HttpTransport(TransportSettings(host="127.0.0.1")) for _ in range(2)]
    ends = [await server.start() for server in servers]
    yield (
        Publisher(ledger=ledger, transport=servers[0], endpoint=ends[0], incarnation=0, parts=2),
        WeightSeeder(ledger=ledger, transport=servers[1], endpoint=ends[1], part=1, parts=2),
        servers[1],
    )
    for server in servers:
        await server.close()
    await channel.close()


Nodes = tuple[Publisher, WeightSeeder, HttpTransport]


async def test_a_seed_waits_for_rank_0_and_answers_for_its_part(nodes: Nodes) -> None:
    publisher, seed, server = nodes
    joining = asyncio.create_task(seed.publish(snapshot(0), parent=-1))
    await asyncio.sleep(0.1)
    assert not joining.done()
    await publisher.publish(snapshot(0), parent=-1)
    await asyncio.wait_for(joining, LIMIT_S)
    (held,) = server.progress()
    assert (held.version, held.num_ready, held.num_chunks) == (0, 4, 8)


async def test_a_seed_that_is_late_or_differs_only_stays_away(nodes: Nodes) -> None:
    publisher, seed, server = nodes
    await publisher.publish(snapshot(1), parent=-1)
    await asyncio.wait_for(seed.publish(snapshot(0), parent=-1), LIMIT_S)
    await asyncio.wait_for(seed.publish(snapshot(1, shape=(4, 2048)), parent=-1), LIMIT_S)
    assert server.server.versions() == []


async def test_a_publication_is_announced_again_with_its_version(
    one_job: Any, nodes: Nodes
) -> None:
    """Else a ledger that has lost it would number it anew, and nobody serves that number."""
    publisher, _, _ = nodes
    for step in range(2):
        await publisher.publish(snapshot(step), parent=step - 1)
    assert one_job.known == [0, 1]


async def test_a_renumbered_publication_fails(one_job: Any, nodes: Nodes) -> None:
    publisher, _, _ = nodes
    one_job.forgetful = True
    with pytest.raises(StateError, match="version 0 is served, but numbered 1 now"):
        await publisher.publish(snapshot(0), parent=-1)


async def test_at_most_two_snapshots_are_kept(nodes: Nodes) -> None:
    publisher, seed, server = nodes
    for step in range(4):
        await publisher.publish(snapshot(step), parent=step - 1)
        await asyncio.wait_for(seed.publish(snapshot(step), parent=-1), LIMIT_S)
        assert len(server.server.versions()) <= 2
    assert server.server.versions() == [2, 3]
