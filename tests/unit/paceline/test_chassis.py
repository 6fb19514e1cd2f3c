import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

SERVICE = """
import sys
from paceline.chassis import Chassis, Service, main

class Demo(Service):
    def __init__(self, chassis: Chassis) -> None:
        self.chassis = chassis
    async def drain(self) -> None:
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


def start(tmp_path: Path, **settings: object) -> "subprocess.Popen[str]":
    (tmp_path / "service.py").write_text(SERVICE)
    content = {"kind": "reward", "worker_id": "reward-0", **settings}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(content))
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "service.py"), str(tmp_path / "settings.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_sigterm_drains_and_exits_with_0(tmp_path: Path) -> None:
    process = start(tmp_path)
    first_line(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert "drained" in out
    assert process.returncode == 0


def test_a_failing_service_exits_with_1_and_logs_the_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, options={"fail": True})
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "RuntimeError: boom" in err


def test_health_and_metrics_answer(tmp_path: Path) -> None:
    import grpc
    import httpx
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        metrics_port = probe.getsockname()[1]
    process = start(tmp_path, metrics_port=metrics_port)
    try:
        with grpc.insecure_channel(first_line(process)) as channel:
            grpc.channel_ready_future(channel).result(timeout=10)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
        assert 'paceline_up{kind="reward"} 1.0' in text
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(tmp_path, port=port)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 3
    assert f"port {port} on 127.0.0.1 is in use" in err


def test_a_child_ends_itself_when_its_supervisor_stays_away(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    beat.touch()
    process = start(tmp_path, supervisor={"path": str(beat), "stale_s": 1.5})
    first_line(process)
    for _ in range(5):
        os.utime(beat)
        time.sleep(0.5)
    assert process.poll() is None
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "supervisor is gone" in err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "barber"}, "kind: Input should be"),
        ({"colour": "red"}, "colour: unknown field; allowed here: advertise,"),
    ],
)
def test_wrong_settings_exit_with_2(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    process = start(tmp_path, **settings)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert says in err
