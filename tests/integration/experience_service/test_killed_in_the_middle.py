"""The service is killed after the store has executed a write and before the reply arrives."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from grpc.aio import AioRpcError

from paceline.enums import Purpose
from paceline.errors import UnavailableError
from paceline.platform.wire import number_of
from paceline.v1 import jobs_pb2, types_pb2
from paceline_harness.patience import call
from paceline_harness.ports import held_port
from paceline_harness.wires import Wire

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client
    from paceline_harness.experience_service.serving import Killable

    Killables = Callable[[str, Path, int], Killable]


# Episodes of a worker that died with the service are soon leased again.
SHORT = {"batch_groups": 2, "group_size": 2, "max_staleness": 4, "lease_s": 1.0}


@asynccontextmanager
async def wired(url: str) -> AsyncGenerator[tuple[Wire, str]]:
    """A proxy in front of a store, and its URL."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        path = Path(folder) / "w"
        async with Wire(upstream=Path(url.removeprefix("unix://")), path=path) as wire:
            yield wire, f"unix://{path}"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def kinds(client: Client, job_id: str) -> list[tuple[int, int]]:
    reply = await call(client.jobs.ListMetrics, jobs_pb2.ListMetricsRequest(job_id=job_id))
    return sorted((row.kind, row.step) for row in reply.rows)


@pytest.mark.timeout(600)
async def test_nothing_is_lost_or_duplicated(
    one_store: str, killables: Killables, tmp_path: Path
) -> None:
    async with wired(one_store) as (wire, url):
        with held_port() as port:
            service = killables(url, tmp_path, port)
            service.start()
            try:
                await _nothing_is_lost(service, wire, tmp_path)
            finally:
                service.kill()


async def _nothing_is_lost(service: Killable, wire: Wire, run_dir: Path) -> None:
    async with service.connected() as client:
        job_id = (
            await client.submit(eval={"every": 1, "tasks": 2}, experience=SHORT)
        ).status.job_id
        trainer = client.trainer(job_id)
        await trainer.begin(0)
        async with client.environment():
            await trainer.publish_version(0)
            batch_id = (await trainer.take(0))[0].batch_id
        wire.cut(b'"trained_tokens"', done=True, told=service.kill)
        with pytest.raises(UnavailableError):
            await trainer.commit(0, batch_id)
    service.start()
    async with service.connected() as client:
        again = client.trainer(job_id)
        await again.be(trainer.incarnation)
        assert (await again.commit(0, batch_id)).step == 1
        await again.commit_checkpoint(1)
        await until(lambda: (folder(run_dir, job_id) / "step-000001.jsonl").exists())
        wire.cut(b'"eval_sets"', done=True, told=service.kill)
        with suppress(UnavailableError, AioRpcError):  # the workers notice that it is gone
            async with client.environment():
                await again.publish_version(1)
                await until(lambda: wire.num_cuts == 2)
    service.start()
    async with service.connected() as client:
        last = client.trainer(job_id)
        await last.be(trainer.incarnation)
        async with client.environment():
            await last.train(1)
            await last.train(2)
            assert (await last.train(3)) == "finished"
            await last.commit_checkpoint(4)
            await last.take(4)
            await client.watch(job_id)
        status = (await client.get(job_id)).status
        assert (status.state, status.eval_step) == (types_pb2.JOB_STATE_SUCCEEDED, 4)
        rows = await kinds(client, job_id)
    assert [step for kind, step in rows if kind == types_pb2.PURPOSE_TRAIN] == [1, 2, 3, 4]
    evals = [step for kind, step in rows if kind == types_pb2.PURPOSE_EVAL]
    assert len(evals) == len(set(evals))
    told = lines(run_dir / "jobs" / job_id / "metrics.jsonl")
    assert sorted((number_of(Purpose(line["kind"])), line["step"]) for line in told) == rows
    written = [x for p in folder(run_dir, job_id).glob("*.jsonl") for x in lines(p)]
    names = [(x["group_id"], x["index"]) for x in written]
    assert len(names) == len(set(names)) == 16


def folder(run_dir: Path, job_id: str) -> Path:
    return run_dir / "jobs" / job_id / "trajectories"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)
