"""No call between services, or to this machine, goes through a proxy of the environment."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from paceline.config.sections.endpoints import EndpointSettings
from paceline.config.service import ServiceSettings, TracingSettings
from paceline.enums import WorkerKind
from paceline.errors import PacelineError, UnavailableError
from paceline.front.client.client import AsyncClient, Client
from paceline.front.local.processes import Processes
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import episode_context, start
from paceline.platform.transport.endpoints import WorkerEndpoints
from paceline.platform.transport.rpc import connect
from paceline_controller.certificates.config import Issue, Leaf
from paceline_controller.certificates.secrets import Secrets
from paceline_controller.runtimes.kubernetes.connection import KubernetesClient, configuration
from paceline_controller.runtimes.kubernetes.resources import PODS
from paceline_harness.otlp import Collector
from paceline_harness.patience import PATIENCE_S
from paceline_rollout.engines.sglang.server import Launch

OUTSIDE = "http://elsewhere.example"  # a name that nobody has
NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


class Recorder:
    """Listens like a server, notes the first line of each request, and refuses it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    connection.settimeout(PATIENCE_S)
                    self.lines.append(connection.recv(65536).decode("latin1").partition("\r\n")[0])
                    connection.sendall(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")


@pytest.fixture
def server() -> Iterator[Recorder]:
    """A server on this machine."""
    made = Recorder()
    yield made
    made.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """The proxy of all calls that the environment of this process and its children names."""
    made = Recorder()
    for name in NAMES:
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, f"http://{made.address}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.close()


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Callable[..., Path]:
    """Writes one for a server, perhaps with a proxy of its own."""

    def write(url: str, **more: str) -> Path:
        path = tmp_path / "kubeconfig"
        cluster = {"server": url, **more}
        content = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    return write


async def ask_kubernetes(path: Path) -> None:
    """As the controller does, and as the issuer of certificates does."""
    made = KubernetesClient(await configuration(path), namespace="ns", timeout_s=PATIENCE_S)
    with pytest.raises(PacelineError):
        await made.get(PODS, "a")
    await made.close()
    issue = Issue(
        namespace="ns", authority="ca", services={"gateway": Leaf(secret="s")}, kubeconfig=str(path)
    )
    with pytest.raises(PacelineError):
        Secrets.connect(issue).read("s")


async def test_services_call_each_other_directly(proxy: Recorder) -> None:
    served = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), served)
    port = served.add_insecure_port("127.0.0.1:0")
    await served.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            check: Any = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
            reply = await check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await served.stop(0)
    assert proxy.lines == []


async def test_the_gateway_of_this_machine_is_called_directly(
    proxy: Recorder, server: Recorder
) -> None:
    with Client(f"http://{server.address}") as client, pytest.raises(PacelineError):
        client.get("job-1")
    async with AsyncClient(f"http://{server.address}") as other:
        with pytest.raises(PacelineError):
            await other.get("job-1")
    assert server.lines == ["GET /v1/jobs/job-1 HTTP/1.1"] * 2
    assert proxy.lines == []


async def test_a_gateway_elsewhere_is_called_through_it(proxy: Recorder) -> None:
    with Client(OUTSIDE) as client, pytest.raises(PacelineError):
        client.get("job-1")
    async with AsyncClient(OUTSIDE) as other:
        with pytest.raises(PacelineError):
            await other.get("job-1")
    assert proxy.lines == [f"GET {OUTSIDE}/v1/jobs/job-1 HTTP/1.1"] * 2


def test_a_proxy_that_does_not_answer_is_named(
    proxy: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with (
        Client(OUTSIDE) as client,
        pytest.raises(UnavailableError, match=r"through the proxy 127\.0\.0\.1:9 .*no_proxy"),
    ):
        client.get("job-1")


async def test_judges_of_this_machine_are_asked_directly(proxy: Recorder, server: Recorder) -> None:
    urls = {"near": f"http://{server.address}/v1", "far": f"{OUTSIDE}/v1"}
    settings = {name: EndpointSettings(base_url=url) for name, url in urls.items()}
    endpoints = WorkerEndpoints(settings)
    for name in urls:
        with pytest.raises(PacelineError, match="403"):
            await endpoints.of(QueueOwner(), PATIENCE_S).post(name, "/chat", {}, most=1)
    await endpoints.close()
    assert server.lines == ["POST /v1/chat HTTP/1.1"]
    assert proxy.lines == [f"POST {OUTSIDE}/v1/chat HTTP/1.1"]


async def test_the_kubernetes_api_is_asked_as_kubectl_asks_it(
    proxy: Recorder, server: Recorder, kubeconfig: Callable[..., Path]
) -> None:
    await ask_kubernetes(kubeconfig(f"http://{server.address}"))
    assert len(server.lines) == 2
    assert proxy.lines == []
    await ask_kubernetes(kubeconfig(OUTSIDE))
    assert len(proxy.lines) == 2
    assert all(line.startswith(f"GET {OUTSIDE}/api/v1/namespaces/ns") for line in proxy.lines)
    await ask_kubernetes(kubeconfig(OUTSIDE, **{"proxy-url": f"http://{server.address}"}))
    assert (len(server.lines), len(proxy.lines)) == (4, 2)


def test_spans_reach_a_collector_of_this_machine_directly(proxy: Recorder) -> None:
    with Collector() as collector:
        tracing = TracingSettings(endpoint=collector.endpoint, sample=1.0, timeout_s=PATIENCE_S)
        settings = ServiceSettings(kind=WorkerKind.REWARD, worker_id="reward-0", tracing=tracing)
        tracer = start(settings, Metrics())
        with tracer.root("episode", episode_context("job.1", 0), job="a"):
            pass
        tracer.close(PATIENCE_S)
        assert [span.name for span in collector.spans()] == ["episode"]
    assert proxy.lines == []


def test_started_processes_leave_this_machine_out(proxy: Recorder, tmp_path: Path) -> None:
    out = tmp_path / "told"
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['no_proxy'])"
    processes = Processes(folder=tmp_path / "processes", logs=tmp_path / "logs")
    processes.start("child", [sys.executable, "-c", code, str(out)], mark=str(out))
    while processes.alive("child"):
        pass
    assert "127.0.0.1" in out.read_text().split(",")
    launch = Launch(Path(sys.executable), tmp_path, out, "float32", "cpu", 64, 1, 64, 1)
    assert "127.0.0.1" in launch.variables()["no_proxy"].split(",")
    assert proxy.address in launch.variables()["https_proxy"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_runs_behind_a_proxy(
    forks: None, proxy: Recorder, tiny_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """All services of an installation start, find each other, and train."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tiny_job(eval=None, stop={"steps": 2})))
    command = [sys.executable, "-m", "paceline.front.cli"]
    options = ["--run-dir", str(tmp_path / "run"), "--port=0"]
    done = subprocess.run(
        [*command, "run", str(tmp_path / "job.yaml"), *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert proxy.lines == []
