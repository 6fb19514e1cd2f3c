"""Jobs with filters and advantages of their own: found again, ended, and no trouble to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from paceline.enums import JobState
from paceline.errors import InvalidError
from paceline.isolation.code.archive import pack
from paceline.isolation.sandbox import landlock
from paceline.platform.transport.sending import send
from paceline.v1 import jobs_pb2, types_pb2
from paceline_harness.patience import PATIENCE_S, call
from paceline_harness.processes import sealed_processes

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client
    from paceline_harness.experience_service.serving import Killable, Lives

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes"),
]
# At submit a group has answers, those of the tests have none.
CODE = """
import os
from paceline.plugins import Advantages, Keep, declares


def deed(group, *, what):
    while what == "loop" and not group.answers[0]:
        pass
    if what == "memory" and not group.answers[0]:
        bytearray(64 << 30)
    if what == "exit" and not group.answers[0]:
        os._exit(1)
    return Keep()


@declares(needs=("memory",))
def counts(batch, context):
    seen = context.memory.get("seen", 0) + 1
    return Advantages(batch.rewards - 0.5, memory={"seen": seen}, notes={"seen": float(seen)})
"""


async def uploaded(client: Client, tmp_path: Path) -> dict[str, str]:
    """The section `code` of a job."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "own.py").write_text(CODE)
    archive = BytesIO()
    pack(folder, archive)

    async def messages() -> AsyncIterator[jobs_pb2.UploadCodeRequest]:
        yield jobs_pb2.UploadCodeRequest(archive=archive.getvalue())

    reply = await send(client.jobs.UploadCode, messages(), timeout_s=PATIENCE_S)
    return {"digest": reply.digest}


def own(**experience: Any) -> dict[str, Any]:
    usual = {"batch_groups": 2, "group_size": 2, "max_staleness": 4, "lease_s": 100.0}
    return {"experience": usual | experience}


async def until(holds: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.05)
    assert holds(), what


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            own(filters=["missing:f"]),
            "experience.filters.0.kind: module 'missing' is not in the job's code",
        ),
        (own(filters=["own:deed"]), "experience.filters.0.what: is missing"),
        (
            own(sampler="own:order"),
            "module 'own' has no attribute 'order'; functions in it: counts",
        ),
    ],
)
async def test_what_cannot_be_run_is_refused(
    lives: Lives, one_store: str, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    async with lives(one_store, tmp_path) as client:
        with pytest.raises(InvalidError, match=problem):
            await client.submit(code=await uploaded(client, tmp_path), **changes)


@pytest.mark.parametrize(
    ("what", "why"),
    [("loop", "did not answer within 2 s"), ("memory", "MemoryError"), ("exit", "exit code 1")],
)
async def test_a_hostile_filter_fails_its_job_and_delays_no_other(
    lives: Lives, one_store: str, tmp_path: Path, what: str, why: str
) -> None:
    service = psutil.Process()
    limit_s = 2.0 if what == "loop" else PATIENCE_S
    async with lives(one_store, tmp_path, code_call_s=limit_s) as client:
        code = await uploaded(client, tmp_path)
        hostile = own(filters=[{"kind": "own:deed", "what": what}])
        bad = (await client.submit(code=code, **hostile)).status.job_id
        good = (await client.submit()).status.job_id
        trainers = [client.trainer(bad), client.trainer(good)]
        for each in trainers:
            await each.begin(0)
        async with client.environment():
            for each in trainers:
                await each.publish_version(0)
            waits = asyncio.create_task(trainers[0].take(0))
            for step in range(4):
                await trainers[1].train(step)
            if what == "loop":
                assert not waits.done()  # the other's filter was running all the time
            assert (await asyncio.wait_for(waits, PATIENCE_S))[
                0
            ].stop == types_pb2.STOP_REASON_CANCELLED
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get(bad)).status.state != types_pb2.JOB_STATE_FAILED:
                await asyncio.sleep(0.05)
        reason = (await client.get(bad)).status.reason
        assert reason.startswith("experience.filters.0: own:deed: ")
        assert why in reason
        await until(lambda: not sealed_processes(service), "processes of a job that is over")


async def test_a_restart_finds_the_code_again_and_the_end_of_a_job_ends_it(
    killable: tuple[Killable, str], tmp_path: Path
) -> None:
    service, _ = killable
    async with service.connected() as client:
        changes = own(filters=[{"kind": "own:deed", "what": ""}], advantage="own:counts")
        code = await uploaded(client, tmp_path)
        job = await client.submit(code=code, eval=None, stop={"steps": 100}, **changes)
        job_id = job.status.job_id
        trainer = client.trainer(job_id)
        await trainer.begin(0)
        await trainer.publish_version(0)
        async with client.environment():
            for step in range(2):
                await trainer.train(step)
    service.kill()
    service.start()
    async with service.connected() as client:
        trainer = client.trainer(job_id)
        await trainer.begin(0)
        async with client.environment():
            for step in range(4):
                await trainer.train(step)
        rows = await call(client.jobs.ListMetrics, jobs_pb2.ListMetricsRequest(job_id=job_id))
        seen = [row.values["seen"] for row in rows.rows if "seen" in row.values]
        assert seen == [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]  # steps 0 and 1 are trained again
        process = psutil.Process(service.pid)
        assert len(sealed_processes(process)) == 1
        await client.set_state(job_id, JobState.CANCELLING)
        await client.set_state(job_id, JobState.CANCELLED)
        await until(lambda: not sealed_processes(process), "processes of a job that was cancelled")
