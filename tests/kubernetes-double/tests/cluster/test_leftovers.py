"""However a cluster ends, it leaves nothing on the machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from kubernetes_double import Cluster
from kubernetes_double.patience import PATIENCE_S

Object = dict[str, Any]
MARK = f"time.sleep(54321{os.getpid()})"
HOLD = """
import sys, time, pathlib
from kubernetes_double import Cluster
cluster = Cluster(folder=pathlib.Path(sys.argv[1]))
cluster.__enter__()
cluster.apply(sys.argv[2])
cluster.until(lambda: cluster.ready("app=sleeps") == 1, "the pod runs")
print(cluster.server.host, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def possible() -> None:
    if reason := Cluster.unavailable_reason():
        pytest.skip(reason)


def is_clean(folder: Path, address: str) -> bool:
    """No interface with the cluster's address, no mount below its folder."""
    addresses = {one.address for many in psutil.net_if_addrs().values() for one in many}
    return address not in addresses and str(folder) not in Path("/proc/self/mountinfo").read_text()


def processes() -> list[str]:
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if MARK in line]


def gone(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def fail(folder: Path, pod: Object, addresses: list[str]) -> None:
    with Cluster(folder=folder) as cluster:
        cluster.apply([pod])
        cluster.until(lambda: cluster.ready("app=sleeps") == 1, "the pod runs")
        assert processes()
        addresses.append(cluster.server.host)
        assert not is_clean(folder, addresses[0])
        raise ZeroDivisionError


@pytest.mark.slow
def test_nothing_is_left_after_a_test_that_fails(
    tmp_path: Path, pod: Callable[..., Object]
) -> None:
    addresses: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "c", pod("sleeps", f"import time; {MARK}"), addresses)
    assert not processes()
    assert gone(lambda: is_clean(tmp_path, addresses[0]))
    assert not (tmp_path / "c" / "pods").exists()


@pytest.mark.slow
def test_nothing_is_left_after_a_test_that_is_killed(
    tmp_path: Path, pod: Callable[..., Object]
) -> None:
    manifest = yaml.safe_dump(pod("sleeps", f"import time; {MARK}"))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "c"), manifest], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    address = holder.stdout.readline().decode().strip()
    assert not is_clean(tmp_path, address)
    assert processes()
    holder.send_signal(signal.SIGKILL)
    holder.wait(PATIENCE_S)
    holder.stdout.close()
    assert gone(lambda: not processes())
    assert gone(lambda: is_clean(tmp_path, address))


@pytest.mark.slow
def test_nothing_is_left_when_the_nodes_are_killed(
    tmp_path: Path, pod: Callable[..., Object]
) -> None:
    with Cluster(folder=tmp_path / "c") as cluster:
        cluster.apply([pod("sleeps", f"import time; {MARK}")])
        cluster.until(lambda: cluster.ready("app=sleeps") == 1, "the pod runs")
        # Children of other tests that ended and were not waited for have no command line.
        found = psutil.process_iter(["ppid", "cmdline"])
        [nodes] = [
            process
            for process in found
            if process.info["ppid"] == os.getpid()
            and str(tmp_path) in " ".join(process.info["cmdline"] or [])
        ]
        address = cluster.server.host
        nodes.kill()
        assert gone(lambda: not processes())
    assert gone(lambda: is_clean(tmp_path, address))
