from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import yaml
from grpc_health.v1.health_pb2 import HealthCheckResponse

from paceline.config import ServiceSettings
from paceline.config.sections.model import ModelSettings
from paceline.config.tokenizers import TokenizerSettings
from paceline.enums import JobState, WorkerKind
from paceline.errors import ConfigError, UnavailableError
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.models.resolve import ModelResolver
from paceline.platform.files import TOKEN_FILE
from paceline.platform.server.chassis import serve
from paceline.platform.transport.operations import operation
from paceline.platform.transport.principal import service
from paceline.platform.transport.rpc import connect, stream
from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import types_pb2
from paceline_gateway.job_api import JobApi
from paceline_gateway.readiness import Readiness
from paceline_gateway.service import build
from paceline_gateway.submit.checks import MAX_FILES_BYTES, check_files
from paceline_gateway.submit.trial import ModelTrial
from paceline_gateway.upstream import Upstream
from paceline_harness.jobs import serve_jobs
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Gateway

else:
    Gateway = Any


def settings(run_dir: Path, **changes: Any) -> ServiceSettings:
    fields: dict[str, Any] = {
        "kind": WorkerKind.GATEWAY,
        "worker_id": "gateway-0",
        "run_dir": run_dir,
        "experience": "127.0.0.1:1",
        "token": "pl_bootstrap_of_these_tests",
        "options": {"http_port": 0},
        "insecure": True,
        "tokenizers": {"run_in": "in_process"},
    }
    return ServiceSettings(**(fields | changes))


def taken_port() -> tuple[socket.socket, int]:
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.listen()
    return holder, holder.getsockname()[1]


async def test_http_port_in_use(tmp_path: Path) -> None:
    holder, port = taken_port()
    with (
        holder,
        pytest.raises(UnavailableError, match=rf"http_port {port} on 127.0.0.1 .*in use.*stop"),
    ):
        await serve(settings(tmp_path, options={"http_port": port}), build)


async def test_port_in_use_as_a_process(tmp_path: Path) -> None:
    holder, port = taken_port()
    path = tmp_path / "settings.yaml"
    wanted = settings(tmp_path, options={"http_port": port})
    path.write_text(yaml.safe_dump(wanted.model_dump(mode="json")))
    with holder:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "paceline_gateway", str(path), stderr=asyncio.subprocess.PIPE
        )
        _, error = await process.communicate()
    assert process.returncode == 3
    assert f"UnavailableError: http_port {port} on 127.0.0.1" in error.decode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experience": ""}, "experience: host:port of the experience service is missing"),
        ({"token": "short"}, "token: has 5 characters; at least 16 are needed"),
        (
            {"options": {"port": 1}},
            "port: unknown field; allowed here: dtype, endpoints, http_port",
        ),
    ],
)
async def test_bad_settings(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await serve(settings(tmp_path, **changes), build)


@pytest.mark.parametrize("kept", ["", "\n", "short\n"])
async def test_a_token_file_that_is_cut_off_opens_nothing(tmp_path: Path, kept: str) -> None:
    path = tmp_path / TOKEN_FILE
    path.write_text(kept)
    told = rf"token: the file {path}: has {len(kept.strip())} characters; at least 16"
    with pytest.raises(ConfigError, match=told):
        await serve(settings(tmp_path, token=""), build)
    assert path.read_text() == kept


@pytest.mark.parametrize("name", ["GetJob", "WatchJob"])
async def test_without_a_token_no_message_is_read(gateway: Gateway, name: str) -> None:
    method = f"/paceline.v1.Jobs/{name}"

    def asked(token: str) -> grpc.StatusCode:
        # Not by grpc.aio: it may miss what is said of a stream that is refused at once.
        with grpc.insecure_channel(gateway.chassis.address) as channel:
            shape = channel.unary_stream if name == "WatchJob" else channel.unary_unary
            pairs = (("authorization", f"Bearer {token}"),) if token else ()
            with pytest.raises(grpc.RpcError) as caught:
                list(shape(method)(b"\xff" * 10, timeout=PATIENCE_S, metadata=pairs))
        error: Any = caught.value
        return error.code()

    async def told(token: str) -> grpc.StatusCode:
        return await asyncio.to_thread(asked, token)

    assert await told("") is grpc.StatusCode.UNAUTHENTICATED
    assert await told("pl_of_nobody") is grpc.StatusCode.UNAUTHENTICATED
    assert await told(gateway.chassis.settings.token) is grpc.StatusCode.INVALID_ARGUMENT


async def test_upstream_unreachable(gateway: Gateway) -> None:
    await gateway.upstream.stop(None)
    response = await gateway.http.get("/readyz")
    assert response.status_code == 503
    told = {"type": "UnavailableError", "message": "the experience service does not answer"}
    assert response.json()["error"] == told
    assert (await gateway.http.get("/livez")).status_code == 200


async def test_readiness_checks_cost_one_upstream_call_per_second() -> None:
    now, asked, status = 100.0, 0, HealthCheckResponse.SERVING

    async def check(request: Any, *, timeout: float | None = None) -> HealthCheckResponse:
        nonlocal asked
        asked += 1
        return HealthCheckResponse(status=status)

    readiness = Readiness(check=check, clock=lambda: now)
    await asyncio.gather(*(readiness.ready() for _ in range(20)))
    assert asked == 1
    status = HealthCheckResponse.NOT_SERVING
    await readiness.ready()
    now += 1.0
    for _ in range(3):
        with pytest.raises(UnavailableError, match="the experience service does not answer"):
            await readiness.ready()
    assert asked == 2


async def test_a_call_waits_for_an_upstream_that_comes_back(gateway: Gateway) -> None:
    await gateway.upstream.stop(None)
    asking = asyncio.create_task(gateway.http.get("/v1/jobs"))
    await asyncio.sleep(0.3)
    again, _ = await serve_jobs(gateway.jobs, port=gateway.upstream_port)
    assert (await asking).status_code == 200
    await again.stop(None)


async def test_calls_of_an_upstream_that_is_away_end_in_time(tmp_path: Path) -> None:
    async with connect("127.0.0.1:1") as channel:
        upstream = Upstream(channel, timeout_s=3.0)
        trial = ModelTrial(TokenizerSettings(run_in="in_process"), Sandbox())
        models = ModelResolver(ModelSettings(), run_dir=tmp_path)
        job_api = JobApi(
            upstream=upstream, on_refusal=lambda refusal: None, trial=trial, models=models
        )
        who = service("somebody")
        told = "^the experience service does not answer$"
        with pytest.raises(UnavailableError, match=told):
            await upstream.call(operation("Jobs", "GetJob"), pb.GetJobRequest(job_id="j"), who)
        with pytest.raises(UnavailableError, match=told):
            await anext(job_api.watch(pb.WatchJobRequest(job_id="j"), who))


async def test_watch_outlives_the_upstream(gateway: Gateway, job: dict[str, Any]) -> None:
    job_id = await gateway.submitted(job)
    await gateway.jobs.measure(job_id, loss=1.0)
    watching = stream(gateway.stub.WatchJob, pb.WatchJobRequest(job_id=job_id), timeout_s=100.0)
    first = await anext(watching)
    await gateway.upstream.stop(None)
    await gateway.jobs.measure(job_id, loss=0.5)
    await gateway.jobs.move(job_id, JobState.CANCELLING, JobState.CANCELLED)
    again, _ = await serve_jobs(gateway.jobs, port=gateway.upstream_port)
    rest = [event async for event in watching]
    assert [row.index for event in (first, *rest) for row in event.metrics] == [0, 1]
    assert rest[-1].status.state == types_pb2.JOB_STATE_CANCELLED
    await again.stop(None)


async def test_open_events_do_not_hold_up_the_end(gateway: Gateway, job: dict[str, Any]) -> None:
    job_id = await gateway.submitted(job)
    async with gateway.http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        await anext(response.aiter_lines())
        gateway.chassis.stop()
        await asyncio.sleep(0)


def test_files_are_checked() -> None:
    needed = {"config.json": b"{}", "tokenizer.json": b"{}"}
    with pytest.raises(
        ConfigError, match=r"files: 'x.bin' is not a small model file; allowed: con"
    ):
        check_files(needed | {"x.bin": b""}, source="files")
    with pytest.raises(ConfigError, match="at most"):
        check_files(needed | {"chat_template.jinja": b" " * (MAX_FILES_BYTES + 1)}, source="files")
