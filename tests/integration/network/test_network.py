"""Networks of namespaces: rates, counters, cuts and cleanup."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_harness.network import Host, Network
from paceline_harness.patience import PATIENCE_S

MIB = 1 << 20
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    while peer.recv(1 << 20):
        pass
    peer.sendall(b"all")
    peer.close()
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3]))
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
sys.exit(0 if peer.recv(3) else 1)
"""
HOLD = """
import subprocess, time
from paceline_harness.network import Network
network = Network(hosts=(2,), mbit=100)
script = "stat -Lc %i /proc/self/ns/net; exec sleep 600"
child = network.hosts[1].start(["sh", "-c", script], stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _able() -> None:
    if reason := Network.unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def sites() -> Iterator[Network]:
    with Network(hosts=(2, 1), mbit=400, between_mbit=100) as network:
        yield network


def listen(host: Host) -> None:
    server = host.start([sys.executable, "-c", LISTEN, host.address], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"up\n"


def send(
    host: Host, to: Host, num_bytes: int, *, timeout_s: float = PATIENCE_S
) -> tuple[int, float]:
    """Exit code and seconds."""
    command = [sys.executable, "-c", SEND, to.address, str(num_bytes), str(timeout_s)]
    started = time.monotonic()
    code = host.start(command, stderr=subprocess.DEVNULL).wait(timeout_s + 60)
    return code, time.monotonic() - started


def test_bytes_are_counted_where_they_pass_and_nowhere_else(sites: Network) -> None:
    one, near, far = sites.hosts
    listen(one)
    assert send(near, one, 4 * MIB)[0] == 0
    assert near.sent_bytes() > 4 * MIB
    assert sum(sites.crossed_bytes()) < MIB
    assert send(far, one, 4 * MIB)[0] == 0
    rightwards, leftwards = sites.crossed_bytes()
    assert 4 * MIB < leftwards < 5 * MIB
    assert rightwards < MIB
    assert 8 * MIB < one.received_bytes() < 10 * MIB


def test_nothing_is_faster_than_its_links(sites: Network) -> None:
    one, near, far = sites.hosts
    listen(one)
    assert send(near, one, 10 * MIB)[1] > 80 / 400
    assert send(far, one, 10 * MIB)[1] > 80 / 100
    near.set_rate(40)
    assert send(near, one, 2 * MIB)[1] > 16 / 40


def test_a_cut_link_carries_nothing_until_it_is_mended(sites: Network) -> None:
    one, near, _ = sites.hosts
    listen(one)
    near.cut()
    assert send(near, one, 1000, timeout_s=1.0)[0] != 0
    near.mend()
    assert send(near, one, 1000)[0] == 0


def test_two_networks_do_not_meet_and_nothing_of_this_machine_is_touched(sites: Network) -> None:
    with Network(hosts=(2,), mbit=100) as other:
        listen(other.hosts[0])
        code, _ = send(sites.hosts[1], sites.hosts[0], 1000, timeout_s=1.0)
        assert code != 0
        assert send(other.hosts[1], other.hosts[0], 1000)[0] == 0
        names = {name for _, name in socket.if_nameindex()}
        assert not names & {"br0", "p0", "p1", "p2", "to0", "to1"}


def test_a_killed_holder_leaves_nothing_behind() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    namespace, child = map(int, holder.stdout.readline().split())
    # Kept open, so that meanwhile no new namespace is given its number.
    with open(f"/proc/{child}/ns/net") as kept:
        assert os.fstat(kept.fileno()).st_ino == namespace
        holder.send_signal(signal.SIGKILL)
        with holder:
            holder.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{child}").exists()
        assert namespace not in set(namespaces())


def namespaces() -> Iterator[int]:
    """Network namespaces in use by any process."""
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            yield os.stat(path).st_ino
        except OSError:
            continue
