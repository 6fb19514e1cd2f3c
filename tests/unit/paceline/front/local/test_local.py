import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import pytest
from redis import Redis

from paceline.config.load import load, load_settings, validate
from paceline.config.service import ExperienceOptions, LimitsFile
from paceline.enums import WorkerKind
from paceline.errors import StateError, StoreError, UnavailableError
from paceline.front.local.ports import claim
from paceline.front.local.processes import Processes
from paceline.front.local.store import EmbeddedStore, check_url
from paceline.front.local.supervisor import Local
from paceline.platform.files import lock_for_life, private_files
from paceline.platform.transport.service_keys import SPEAKS_FOR, read_keys
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port


def store_in(run_dir: Path) -> EmbeddedStore:
    processes = Processes(folder=run_dir / "processes", logs=run_dir / "logs")
    return EmbeddedStore(run_dir, processes=processes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    made = store_in(tmp_path)
    yield made
    made.stop()


@contextlib.contextmanager
def client_of(store: EmbeddedStore) -> Generator[Redis]:
    client = Redis.from_url(store.url)
    try:
        yield client
    finally:
        client.close()


def test_writes_survive_a_restart(store: EmbeddedStore, tmp_path: Path) -> None:
    store.start()
    with client_of(store) as client:
        client.set("a", "1")
    store.stop()
    assert not store.answers()
    again = store_in(tmp_path)
    again.start()
    with client_of(again) as client:
        assert client.get("a") == b"1"


def test_a_running_store_is_adopted(store: EmbeddedStore, tmp_path: Path) -> None:
    store.start()
    other = store_in(tmp_path)
    with client_of(store) as client:
        before = client.info("server")["process_id"]  # pyright: ignore[reportIndexIssue]
        other.start()
        assert client.info("server")["process_id"] == before  # pyright: ignore[reportIndexIssue]
    other.stop()
    assert not store.answers()


def test_the_store_outlives_its_killed_parent(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from paceline.config.load import load_settings, validate
from paceline.config.service import ExperienceOptions
from paceline.front.local.store import EmbeddedStore
from paceline.front.local.ports import claim
from paceline.front.local.processes import Processes
run_dir = Path({str(tmp_path)!r})
processes = Processes(folder=run_dir / "processes", logs=run_dir / "logs")
EmbeddedStore(run_dir, processes=processes).start()
print("on", flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    parent.kill()
    parent.wait()
    store = store_in(tmp_path)
    assert store.answers()
    store.stop()
    assert not store.answers()


def test_a_long_run_directory_gets_a_short_socket(tmp_path: Path) -> None:
    run_dir = tmp_path / ("long" * 30)
    store = store_in(run_dir)
    assert len(store.url) < 110
    assert store_in(run_dir).url == store.url
    store.start()
    store.stop()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://user:secret@127.0.0.1:1/0", "store redis://127.0.0.1:1/0 cannot be reached"),
        ("redis+cluster://:secret@127.0.0.1:1", "store redis.cluster://127.0.0.1:1 cannot be"),
        ("redis://:sec/ret@127.0.0.1:1", "special characters in a password must be"),
        ("http://127.0.0.1:1", "store_url http://127.0.0.1:1: has an unknown scheme"),
    ],
)
def test_a_store_that_cannot_be_reached(url: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=text) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)
    with pytest.raises(StoreError, match=text):
        Local(tmp_path, http_port=0, store_url=url).start()


def test_a_port_in_use_starts_nothing(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"port {port} on 127.0.0.1 is in use"):
            Local(tmp_path, http_port=port).start()
    assert not (tmp_path / "store").exists()


def test_installations_that_start_at_once_choose_different_ports(tmp_path: Path) -> None:
    made = [Local(tmp_path / str(number), http_port=None) for number in range(3)]
    assert len({local.url for local in made}) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such claims")
def test_a_port_that_another_installation_will_serve_at_is_in_use(tmp_path: Path) -> None:
    port = free_port()
    claimed = claim(port)
    assert claimed is not None
    with claimed, pytest.raises(UnavailableError, match=f"port {port} on 127.0.0.1 is in use"):
        Local(tmp_path, http_port=port).start()


def test_one_supervisor_per_run_directory(tmp_path: Path) -> None:
    lock = lock_for_life(tmp_path / "up.lock", what="a supervisor")
    with pytest.raises(StateError, match="a supervisor already runs"):
        Local(tmp_path, http_port=0).start()
    lock.close()


def processes_of(run_dir: Path) -> dict[str, int]:
    """The store and the Python processes with settings files in this run directory, by name."""
    found: dict[str, int] = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] == "zombie":
            continue
        for word in process.info["cmdline"] or []:
            if word.startswith(str(run_dir / "settings")):
                found[Path(word).stem] = process.pid
    return found


def wait_for(run_dir: Path, names: set[str], *, without: int = 0) -> dict[str, int]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = processes_of(run_dir)
        if names <= set(found) and without not in found.values():
            return found
        assert time.monotonic() < deadline, f"only {found} run"
        time.sleep(0.1)


BASE = {"gateway", "experience", "controller"}
ALL = {*BASE, "environment-0", "reward-0"}


def check_defaults(folder: Path) -> None:
    """Without options jobs name no functions and read no folders, and callers need keys."""
    found = {path.stem: load_settings(path) for path in folder.glob("*.yaml")}
    assert set(found) >= BASE
    for name, settings in found.items():
        assert settings.plugins.allowed == (), name
        assert settings.service_keys is not None, name
        assert not settings.insecure, name
    assert validate(ExperienceOptions, found["experience"].options).data_folders == ()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_services_start_with_their_limits_and_survive_kills_of_their_supervisor_and_of_each_other(
    tmp_path: Path,
) -> None:
    path, run_dir = tmp_path / "limits.yaml", tmp_path / "run"
    path.write_text("limits: {tenant: {submitted: 3}, reason_bytes: 512}\n")
    command = [
        sys.executable,
        "-m",
        "paceline.front.cli",
        "up",
        "--run-dir",
        str(run_dir),
        "--port=0",
    ]
    first = subprocess.Popen(
        [*command, "--limits", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        before = wait_for(run_dir, ALL)
        assert first.stdout is not None
        assert any(b"serving at" in line for line in first.stdout)
        check_defaults(run_dir / "settings")
        for name in before:
            limits = load_settings(run_dir / "settings" / f"{name}.yaml").limits
            assert (limits.tenant.submitted, limits.reason_bytes) == (3, 512)
    finally:
        first.kill()
        first.wait()
    with Local(run_dir, http_port=0, limits=load(LimitsFile, path).limits) as local:
        assert wait_for(run_dir, ALL) == before
        for name in sorted(BASE):
            os.kill(before[name], signal.SIGKILL)
            after = wait_for(local.run_dir, ALL, without=before[name])
            kept = ALL - {name}
            assert {n: after[n] for n in kept} == {n: before[n] for n in kept}
            before = after
    assert processes_of(run_dir) == {}


def refusal_of(run_dir: Path, name: str, method: str) -> grpc.StatusCode:
    """What a process answers to a caller who shows nothing."""
    settings = load_settings(run_dir / "settings" / f"{name}.yaml")
    with grpc.insecure_channel(f"{settings.host}:{settings.port}") as channel:
        call = channel.unary_unary(method)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10, wait_for_ready=True)
            error: Any = refused.value
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                return error.code()
            assert time.monotonic() < deadline, f"{name} does not answer"


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a JSON document but the names of fields."""
    if isinstance(value, dict):
        for each in cast(dict[str, Any], value).values():
            yield from texts_in(each)
    else:
        yield str(value)


@pytest.mark.slow
def test_processes_refuse_who_has_no_key_and_start_again_with_new_keys(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "paceline.front.cli",
        "up",
        "--run-dir",
        str(tmp_path),
        "--port=0",
    ]
    up = subprocess.Popen(command)
    try:
        before = wait_for(tmp_path, ALL)
        for service, methods in {
            "experience": ("Access/CreateToken", "Experience/IssueCredential", "Jobs/SubmitJob"),
            "reward-0": ("Reward/Score",),
            "environment-0": ("Environment/Status",),
        }.items():
            for method in methods:
                code = refusal_of(tmp_path, service, f"/paceline.v1.{method}")
                assert code is grpc.StatusCode.PERMISSION_DENIED, method
    finally:
        up.kill()
        up.wait()
    folder = tmp_path / "service-keys"
    keys = [*folder.rglob("*.json")]
    assert {path.stem for path in keys} == {"keys", "environment-0", "reward-0"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in [folder / "secret", *keys])
    for path in keys:
        kind = WorkerKind(path.parent.name if path.stem == "keys" else path.stem.partition("-")[0])
        assert set(read_keys(path).keys) == SPEAKS_FOR.get(kind, {kind}), path
    told = "".join(
        path.read_text(errors="replace")
        for part in ("settings", "processes", "logs")
        for path in (tmp_path / part).iterdir()
        if path.is_file()  # one is the socket of the fork server
    )
    for path in keys:
        assert not [text for text in texts_in(json.loads(path.read_text())) if text in told]
    assert (folder / "secret").read_text().strip() not in told
    shutil.rmtree(folder)  # as it was before there were keys
    with Local(tmp_path, http_port=0):
        after = wait_for(tmp_path, ALL, without=before["reward-0"])
        after = wait_for(tmp_path, ALL, without=before["environment-0"])
        assert not set(before.values()) & set(after.values())
    assert processes_of(tmp_path) == {}


def test_private_files_end_with_the_context(tmp_path: Path) -> None:
    with private_files():
        (tmp_path / "own").touch()
    (tmp_path / "other").touch()
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0
    assert (tmp_path / "other").stat().st_mode & 0o044
