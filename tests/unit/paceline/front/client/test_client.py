from __future__ import annotations

import asyncio
import gc
import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline import errors
from paceline.config import ServiceSettings, load_job
from paceline.config.tokenizers import TokenizerSettings
from paceline.enums import JobState, WorkerKind
from paceline.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineError,
    NotFoundError,
    PacelineError,
    StateError,
    UnavailableError,
)
from paceline.front.api.documents import JobEvent
from paceline.front.client.client import AsyncClient, Client, EventReader, error_of
from paceline.platform.files import token_of
from paceline.platform.server.chassis import Chassis, serve
from paceline_gateway.service import GatewayService, build
from paceline_harness.jobs import JobsInMemory, jobs_in_memory, serve_jobs
from paceline_harness.models.folders import write_empty_model
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port

TO_THE_END = (JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED)


class Gateway:
    """A gateway on loopback that can be stopped and started again."""

    def __init__(self, *, jobs: JobsInMemory, upstream_port: int, run_dir: Path) -> None:
        self.jobs = jobs
        self.run_dir = run_dir
        self.url = ""
        self._upstream = f"127.0.0.1:{upstream_port}"
        self._http_port = free_port()  # outside the ephemeral range, so that it can be reused
        self._chassis: Chassis | None = None
        self._serving: asyncio.Task[int] | None = None

    @property
    def token(self) -> str:
        return token_of(self.run_dir)

    async def start(self) -> None:
        settings = ServiceSettings(
            kind=WorkerKind.GATEWAY,
            worker_id="gateway-0",
            run_dir=self.run_dir,
            experience=self._upstream,
            options={"http_port": self._http_port},
            tokenizers=TokenizerSettings(run_in="in_process"),
            grace_s=3.0,
            insecure=True,
        )
        note = self.run_dir / "gateway.json"
        note.unlink(missing_ok=True)
        self._serving = asyncio.create_task(serve(settings, self._build))
        while not note.exists():
            await asyncio.sleep(0.01)
            assert not self._serving.done(), self._serving.result()
        self.url = json.loads(note.read_text())["http"]

    async def stop(self) -> None:
        assert self._chassis is not None
        assert self._serving is not None
        self._chassis.stop()
        assert await self._serving == 0

    async def _build(self, chassis: Chassis) -> GatewayService:
        self._chassis = chassis
        return await build(chassis)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    jobs = jobs_in_memory()
    upstream, port = await serve_jobs(jobs)
    made = Gateway(jobs=jobs, upstream_port=port, run_dir=tmp_path)
    await made.start()
    yield made
    await made.stop()
    await upstream.stop(None)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.url, token=gateway.token) as made:
        yield made


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "model"
    folder.mkdir()
    write_empty_model(folder)
    return {
        "name": "demo",
        "model": {"path": str(folder)},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
    }


async def test_submit_a_mapping_a_spec_and_a_file(
    client: AsyncClient, job: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    made = [await client.submit(spec) for spec in (job, load_job(path), path, str(path))]
    assert len({each.status.job_id for each in made}) == 4
    assert made[0].spec == made[1].spec == made[2].spec == made[3].spec
    again = [await client.submit(job, request_id="k") for _ in range(2)]
    assert again[0] == again[1]


async def test_a_submission_that_is_pending_is_repeated(
    client: AsyncClient, gateway: Gateway, job: dict[str, Any]
) -> None:
    for request_id in ("k", ""):
        gateway.jobs.pending = 2
        made = await client.submit(job, request_id=request_id)
        assert gateway.jobs.pending == 0
        assert made.status.state is JobState.QUEUED
    gateway.jobs.pending = 1
    with Client(gateway.url, token=gateway.token) as waits:
        assert await asyncio.to_thread(waits.submit, job, request_id="k") == await client.submit(
            job, request_id="k"
        )
    assert len(gateway.jobs.jobs) == 2


async def test_users_read_what_is_pending(gateway: Gateway, job: dict[str, Any]) -> None:
    gateway.jobs.pending = 1
    headers = {"authorization": f"Bearer {gateway.token}", "idempotency-key": "k"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
        answer = await http.post("/v1/jobs", json=job)
        assert answer.status_code == 503
        assert answer.json()["error"] == {
            "type": "PendingError",
            "message": "fork: the checkpoint is being copied",
        }
        assert gateway.jobs.pending == 0
        assert (await http.post("/v1/jobs", json=job)).status_code == 201


async def test_get_list_and_cancel(client: AsyncClient, job: dict[str, Any]) -> None:
    made = await client.submit(job)
    assert await client.get(made.status.job_id) == made
    cancelled = await client.cancel(made.status.job_id, reason="enough")
    assert (cancelled.status.state, cancelled.status.reason) == (JobState.CANCELLING, "enough")
    page = await client.list(state=["cancelling"], tenant="default")
    assert [each.status for each in page.jobs] == [cancelled.status]
    assert not (await client.list(state="queued")).jobs


async def test_history(client: AsyncClient, gateway: Gateway, job: dict[str, Any]) -> None:
    job_id = (await client.submit(job)).status.job_id
    await gateway.jobs.measure(job_id, loss=2.0)
    await gateway.jobs.measure(job_id, loss=1.0)
    rows = (await client.list_metrics(job_id, after=1)).rows
    assert [row.values for row in rows] == [{"loss": 1.0}]
    assert (await client.list_trajectories(job_id, purpose="eval")).trajectories == []
    assert (await client.verify(job_id)).ok
    assert (await client.list_weights(job_id)).versions == []


async def test_watch_and_wait(client: AsyncClient, gateway: Gateway, job: dict[str, Any]) -> None:
    job_id = (await client.submit(job)).status.job_id
    with pytest.raises(DeadlineError, match=f"job {job_id} has not ended in time"):
        await client.wait(job_id, timeout_s=0.0)
    waiting = asyncio.create_task(client.wait(job_id, timeout_s=PATIENCE_S))
    watching = client.watch(job_id)
    assert (await anext(watching)).status.state is JobState.QUEUED
    await gateway.jobs.measure(job_id, loss=1.0)
    await gateway.jobs.move(job_id, *TO_THE_END)
    rest = [event async for event in watching]
    assert rest[-1].status.state is JobState.SUCCEEDED
    assert [row.values["loss"] for event in rest for row in event.metrics] == [1.0]
    assert (await waiting).status.state is JobState.SUCCEEDED


async def test_watch_outlives_the_gateway(
    client: AsyncClient, gateway: Gateway, job: dict[str, Any]
) -> None:
    job_id = (await client.submit(job)).status.job_id
    await gateway.jobs.measure(job_id, loss=1.0)
    watching = client.watch(job_id)
    first = await anext(watching)
    await gateway.stop()
    await gateway.jobs.measure(job_id, loss=0.5)
    await gateway.jobs.move(job_id, *TO_THE_END)
    await gateway.start()
    rest = [event async for event in watching]
    assert [row.index for event in (first, *rest) for row in event.metrics] == [0, 1]
    assert rest[-1].status.state is JobState.SUCCEEDED


async def test_errors_of_our_hierarchy(
    client: AsyncClient, gateway: Gateway, job: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="nam: unknown field"):
        await client.submit(job | {"nam": 1})
    for missing in (client.get("nope"), client.wait("nope"), anext(client.watch("nope"))):
        with pytest.raises(NotFoundError, match="job 'nope' is not known"):
            await missing
    job_id = (await client.submit(job)).status.job_id
    await gateway.jobs.move(job_id, *TO_THE_END)
    with pytest.raises(StateError, match="has already succeeded"):
        await client.cancel(job_id)


async def test_nobody_there() -> None:
    async with AsyncClient("http://127.0.0.1:1", outage_s=0.0) as nobody:
        for asking in (nobody.get("j"), nobody.wait("j"), anext(nobody.watch("j"))):
            with pytest.raises(UnavailableError, match=r"cannot reach http://127\.0\.0\.1:1"):
                await asking


@pytest.fixture
def packed(tmp_path: Path, job: dict[str, Any]) -> dict[str, Any]:
    """A job with code and data to pack."""
    for name in ("own.py", "rows.jsonl"):
        (tmp_path / name).write_text("")
    return job | {
        "code": {"path": str(tmp_path / "own.py")},
        "data": {"path": str(tmp_path / "rows.jsonl")},
    }


async def test_what_is_packed_is_closed(packed: dict[str, Any]) -> None:
    """Also if it cannot be sent, or one of two cannot be packed."""
    half = packed | {"data": {"path": "nowhere.jsonl"}}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        async with AsyncClient("http://127.0.0.1:1", outage_s=0.0) as nobody:
            with pytest.raises(UnavailableError):
                await nobody.submit(packed)
        with Client("http://127.0.0.1:1", outage_s=0.0) as nobody:
            with pytest.raises(UnavailableError):
                nobody.submit(packed)
            with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
                nobody.submit(half)
        gc.collect()
    assert [str(each.message) for each in warned] == []


def use(client: Client, job: dict[str, Any]) -> list[JobEvent]:
    """All operations of the synchronous client."""
    made = client.submit(job)
    job_id = made.status.job_id
    assert client.get(job_id) == made
    assert [each.status for each in client.list().jobs] == [made.status]
    assert client.list_metrics(job_id).rows == []
    assert client.list_trajectories(job_id).trajectories == []
    assert client.verify(job_id).problems == []
    assert client.list_weights(job_id).holders == []
    with pytest.raises(NotFoundError):
        client.get("nope")
    with pytest.raises(NotFoundError):
        next(client.watch("nope"))
    with pytest.raises(DeadlineError):
        client.wait(job_id, timeout_s=0.0)
    client.cancel(job_id)
    return list(client.watch(job_id))


async def test_synchronous(gateway: Gateway, job: dict[str, Any]) -> None:
    with Client(gateway.url, token=gateway.token) as client:
        using = asyncio.create_task(asyncio.to_thread(use, client, job))
        while not any(j.status.state == "cancelling" for j in gateway.jobs.jobs.values()):
            await asyncio.sleep(0.01)
        await gateway.jobs.move("job-0", JobState.CANCELLED)
        events = await using
        assert events[-1].status.state is JobState.CANCELLED
        ended = await asyncio.to_thread(client.wait, "job-0")
        assert ended.status.state is JobState.CANCELLED


def test_synchronous_with_nobody_there() -> None:
    with Client("http://127.0.0.1:1", outage_s=0.0) as nobody:
        with pytest.raises(UnavailableError, match="is the gateway running"):
            nobody.get("j")
        with pytest.raises(UnavailableError):
            next(nobody.watch("j"))
        with pytest.raises(UnavailableError):
            nobody.wait("j")


@pytest.mark.parametrize("cls", errors.every_class())
def test_every_error_survives_the_round_trip(cls: type[PacelineError]) -> None:
    body = json.dumps({"error": {"type": cls.__name__, "message": "why"}})
    error = error_of(cls.http, body)
    assert type(error) is cls
    assert error.message == "why"


@pytest.mark.parametrize(
    ("status", "body", "cls"),
    [
        (502, "<html>", PacelineError),
        (503, "", UnavailableError),
        (401, "[]", AuthenticationError),
        (404, '{"error": {"type": "Nonsense", "message": "m"}}', NotFoundError),
    ],
)
def test_foreign_errors(status: int, body: str, cls: type[PacelineError]) -> None:
    assert type(error_of(status, body)) is cls


@given(st.lists(st.text(), max_size=3))
def test_events_survive_any_text(reasons: list[str]) -> None:
    reader = EventReader()
    found: list[JobEvent] = []
    for number, reason in enumerate(reasons, start=1):
        status = {"job_id": "j", "name": "n", "tenant": "t", "state": "running", "reason": reason}
        data = json.dumps({"status": status})
        for line in (": still here", "", f"id: {number}", *f"data: {data}\n\n".splitlines()):
            event = reader.feed(line)
            found += [event] if event else []
    assert [event.status.reason for event in found] == reasons
    assert reader.last_id == str(len(reasons))


def test_an_error_event_raises() -> None:
    reader = EventReader()
    reader.feed("event: error")
    reader.feed('data: {"error": {"type": "StoreError", "message": "gone"}}')
    with pytest.raises(errors.StoreError, match="gone"):
        reader.feed("")
