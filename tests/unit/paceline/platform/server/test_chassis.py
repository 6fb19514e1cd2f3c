import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.platform.server.chassis import address_of
from paceline_harness.certificates import Authority
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port

WAIT_S = PATIENCE_S
SERVICE = """
import asyncio, os, subprocess, sys, threading, time
from paceline.platform.server.chassis import Chassis, Service, main

class Demo(Service):
    def __init__(self, chassis: Chassis) -> None:
        self.chassis = chassis
        self.options = chassis.settings.options
    async def start(self) -> None:
        if "start_s" in self.options:
            print("starting", flush=True)
            await asyncio.sleep(self.options["start_s"])
        if "orphan" in self.options:
            subprocess.run(["sh", "-c", "read line < $0 &", self.options["orphan"]], check=True)
    async def drain(self) -> None:
        if "thread_s" in self.options:
            threading.Thread(target=time.sleep, args=[self.options["thread_s"]]).start()
        await asyncio.sleep(self.options.get("drain_s", 0))
        while "drain_until" in self.options and not os.path.exists(self.options["drain_until"]):
            await asyncio.sleep(0.05)
        print("drained", flush=True)
    async def run(self) -> None:
        print(self.chassis.address, flush=True)
        if self.chassis.settings.options.get("fail"):
            raise RuntimeError("boom")
        await super().run()

async def build(chassis: Chassis) -> Service:
    return Demo(chassis)

sys.exit(main(build))
"""


def start(tmp_path: Path, *before: str, **settings: object) -> "subprocess.Popen[str]":
    (tmp_path / "service.py").write_text(SERVICE)
    content = {
        "kind": "reward",
        "worker_id": "reward-0",
        "insecure": "tls" not in settings,
        **settings,
    }
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(content))
    return subprocess.Popen(
        [*before, sys.executable, str(tmp_path / "service.py"), str(tmp_path / "settings.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def iter_until(lines: Iterable[str], text: str) -> Iterator[str]:
    """The lines up to the one with this text."""
    for line in lines:
        yield line
        if text in line:
            return
    raise AssertionError(f"it ended without {text}")


def test_sigterm_drains_and_exits_with_0(tmp_path: Path) -> None:
    process = start(tmp_path)
    first_line(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=WAIT_S)
    assert "drained" in out
    assert process.returncode == 0


def test_while_it_drains_it_is_alive_and_not_ready(tmp_path: Path) -> None:
    metrics_port, enough = free_port(), tmp_path / "enough"
    options = {"drain_until": str(enough)}
    process = start(tmp_path, metrics_port=metrics_port, grace_s=WAIT_S, options=options)
    first_line(process)
    with httpx.Client(base_url=f"http://127.0.0.1:{metrics_port}", timeout=WAIT_S) as http:
        deadline = time.monotonic() + WAIT_S
        while http.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        while http.get("/readyz").text != "draining\n":
            assert time.monotonic() < deadline
        assert http.get("/livez").status_code == 200
    enough.touch()
    out, _ = process.communicate(timeout=WAIT_S)
    assert "drained" in out
    assert process.returncode == 0


@pytest.mark.parametrize(
    "options",
    [{"start_s": 600}, {"drain_s": 600}, {"thread_s": 600}, {"drain_s": 600, "thread_s": 600}],
)
def test_a_stuck_process_exits_soon_after_its_grace_period(
    tmp_path: Path, options: dict[str, float]
) -> None:
    process = start(tmp_path, grace_s=1.0, options=options)
    first_line(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a namespace of processes")
def test_process_1_drains_and_leaves_no_dead_orphans(tmp_path: Path) -> None:
    apart = ("unshare", "--pid", "--fork", "--mount-proc")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = start(tmp_path, *apart, options={"orphan": str(gate)})
    first_line(process)
    inner = psutil.Process(process.pid).children()[0]
    orphans = inner.children()
    assert [orphan.name() for orphan in orphans] == ["sh"]
    gate.write_text("end\n")
    deadline = time.monotonic() + WAIT_S
    while inner.children():
        assert time.monotonic() < deadline, "the orphan was not reaped"
        time.sleep(0.2)
    inner.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=WAIT_S)
    assert "drained" in out
    assert process.returncode == 0


def test_a_failing_service_exits_with_1_and_logs_the_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, options={"fail": True})
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "RuntimeError: boom" in err


@pytest.mark.parametrize(("kind", "times"), [("reward", 1), ("controller", 0)])
def test_an_unused_token_is_logged(tmp_path: Path, kind: str, times: int) -> None:
    secret = "a-token-of-these-tests"
    process = start(tmp_path, kind=kind, token=secret, options={"fail": True})
    _, told = process.communicate(timeout=WAIT_S)
    assert told.count("token is not used by this kind of service") == times
    assert "boom" in told
    assert secret not in told


def test_health_and_metrics_answer(tmp_path: Path) -> None:
    metrics_port = free_port()
    process = start(tmp_path, metrics_port=metrics_port)
    try:
        with grpc.insecure_channel(first_line(process)) as channel:
            grpc.channel_ready_future(channel).result(timeout=WAIT_S)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=WAIT_S).text
        assert 'paceline_build_info{service="reward",' in text
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(tmp_path, port=port)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3
    assert f"port {port} on 127.0.0.1 is in use" in err


def test_a_child_exits_when_its_supervisor_is_gone(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    beat.touch()
    later = time.time() + 3600  # as if the heartbeat never stopped
    os.utime(beat, (later, later))
    process = start(tmp_path, supervisor={"path": str(beat), "stale_s": 1.0})
    first_line(process)
    time.sleep(2.5)
    assert process.poll() is None
    os.utime(beat, (0, 0))
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "supervisor is gone" in err


def test_a_failed_watch_is_logged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    beat = tmp_path / "file" / "beat"
    process = start(tmp_path, supervisor={"path": str(beat), "stale_s": 0.4})
    first_line(process)
    assert process.stderr is not None
    told = list(iter_until(process.stderr, "NotADirectoryError: "))
    assert any("watch failed" in line for line in told)
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("127.0.0.1", "", "127.0.0.1:5"),
        ("::1", "", "[::1]:5"),
        ("0.0.0.0", "10.1.2.3:8400", "10.1.2.3:8400"),
        ("::", "fd00::7:8400", "[fd00::7]:8400"),
        ("::", "[fd00::7]:8400", "[fd00::7]:8400"),
        ("::", "worker-0.workers:8400", "worker-0.workers:8400"),
    ],
)
def test_the_advertised_address(host: str, advertise: str, address: str) -> None:
    settings = ServiceSettings(
        kind=WorkerKind.REWARD, worker_id="r", host=host, advertise=advertise
    )
    assert address_of(settings, 5) == address


def test_new_certificates_end_a_process_cleanly(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.issue("reward", reload_within_s=0.5).model_dump(mode="json")
    process = start(tmp_path, tls=tls)
    first_line(process)
    time.sleep(0.5)
    assert process.poll() is None
    authority.issue("reward")
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "certificates have changed" in err
    assert "drained" in out


def test_a_certificate_that_is_missing_is_named(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("reward").model_dump(mode="json")
    process = start(tmp_path, tls={**tls, "key": str(tmp_path / "none.key")})
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert f"tls.key: {tmp_path}/none.key: No such file" in err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "barber"}, "kind: Input should be"),
        ({"colour": "red"}, "colour: unknown field; allowed here: advertise,"),
    ],
)
def test_wrong_settings_exit_with_2(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    process = start(tmp_path, **settings)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert says in err
