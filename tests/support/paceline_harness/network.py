"""Hosts with links of a given rate, made of network namespaces on this machine.

with Network(hosts=(4, 4), mbit=200, between_mbit=50) as network:
    process = network.hosts[0].start([sys.executable, "server.py", network.hosts[0].address])
    network.hosts[5].set_rate(20)
    network.crossed_bytes()

Every site is a bridge in its own namespace, so the machine's own interfaces are not touched.
Namespaces are unnamed and held only by file descriptors of this process, so the kernel removes
them when it ends for any reason; processes started in them are killed with it. Rates are accurate
to about 4 % (headers); there is no added latency or loss.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from paceline.errors import UnavailableError
from paceline_harness.patience import PATIENCE_S

_TOOLS = ("ip", "nsenter", "setpriv", "tc", "unshare")
_TIMEOUT_S = PATIENCE_S
# A veth packet has up to 64 KiB; with a smaller burst it would be segmented, which costs more CPU
# time than everything else here. The queue holds 20 ms.
_SHAPE = "tbf rate {rate}bit burst 128kb latency 20ms"
_MOST_HOSTS = 250


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace that exists as long as its file descriptor or a process in it."""

    descriptor: int

    @staticmethod
    def make() -> Namespace:
        """Create a namespace with loopback up. Raises `UnavailableError`."""
        made = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo made && read _"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert made.stdout is not None
        try:
            if made.stdout.readline() != "made\n":
                raise UnavailableError(f"network: no namespace: {made.communicate()[1].strip()}")
            return Namespace(os.open(f"/proc/{made.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            with made:
                made.kill()

    @property
    def path(self) -> str:
        """The path at which other processes of this machine can open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside."""
        return ["nsenter", f"--net={self.path}", "--", *command]

    def run(self, tool: str, lines: Sequence[str]) -> None:
        """Run lines of `ip` or `tc` in batch mode. Raises `UnavailableError`."""
        done = subprocess.run(
            self.inside([tool, "-batch", "-"]),
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            raise UnavailableError(f"network: {tool}: {done.stderr.strip()}")

    def counters(self, link: str) -> tuple[int, int]:
        """Bytes that a link has received and sent."""
        done = subprocess.run(
            self.inside(["ip", "-json", "-stats", "link", "show", "dev", link]),
            capture_output=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        stats = json.loads(done.stdout)[0]["stats64"]
        return int(stats["rx"]["bytes"]), int(stats["tx"]["bytes"])

    def shape(self, link: str, mbit: float, *, verb: str = "replace") -> None:
        """Limit the egress rate of a link."""
        rate = _SHAPE.format(rate=round(mbit * 1e6))
        self.run("tc", [f"qdisc {verb} dev {link} root {rate}"])

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self.descriptor)


class Host:
    """One host: its address, its link and its processes."""

    def __init__(self, index: int, *, site: int, hub: Namespace, mbit: float) -> None:
        self.index = index
        self.site = site
        self.address = f"198.18.0.{index + 1}"
        self._hub = hub
        self._port = f"p{index}"
        self._own = Namespace.make()
        self._children: list[subprocess.Popen[Any]] = []
        hub.run(
            "ip",
            [
                f"link add {self._port} type veth peer name eth0 netns {self._own.path}",
                f"link set {self._port} master br0 up",
            ],
        )
        self._own.run("ip", ["link set eth0 up", f"addr add {self.address}/24 dev eth0"])
        self.set_rate(mbit)

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command on this host; the process id is that of the command itself.

        It is killed when the network is closed, and when the thread that started it ends.
        """
        child = subprocess.Popen(
            self._own.inside(["setpriv", "--pdeathsig", "KILL", "--", *command]),
            env={**os.environ, **(environment or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )
        self._children.append(child)
        return child

    def set_rate(self, mbit: float, *, down_mbit: float | None = None) -> None:
        """Change the rate of its link: up, and down if different."""
        self._own.shape("eth0", mbit)
        self._hub.shape(self._port, mbit if down_mbit is None else down_mbit)

    def cut(self) -> None:
        """Take its link down: packets are silently dropped."""
        self._hub.run("ip", [f"link set {self._port} down"])

    def mend(self) -> None:
        """Bring its link up again and flush its neighbour cache."""
        self._hub.run("ip", [f"link set {self._port} up"])
        self._own.run("ip", ["neigh flush dev eth0"])

    def sent_bytes(self) -> int:
        """Bytes sent over its link since its creation, including headers."""
        return self._hub.counters(self._port)[0]

    def received_bytes(self) -> int:
        """Bytes received over its link since its creation, including headers."""
        return self._hub.counters(self._port)[1]

    def close(self) -> None:
        """Kill its processes and release its namespace."""
        for child in self._children:
            child.kill()
        for child in self._children:
            with child:  # closes its pipes and waits
                child.kill()
        self._own.close()


class Network:
    """A star of hosts per site, with the sites connected in a row; a context manager.

    `hosts`: number of hosts per site. `mbit`: rate of every host's link, each way. `between_mbit`:
    rate of the link between two adjacent sites, each way. The attribute `hosts` lists all hosts,
    site by site. Several networks may exist at once and use the same addresses.
    """

    def __init__(
        self, *, hosts: Sequence[int], mbit: float, between_mbit: float | None = None
    ) -> None:
        if not 0 < sum(hosts) <= _MOST_HOSTS:
            raise ValueError(f"hosts: {sum(hosts)} is not within 1 and {_MOST_HOSTS}")
        if len(hosts) > 1 and between_mbit is None:
            raise ValueError("between_mbit: is needed with several sites")
        self.hosts: list[Host] = []
        self._hubs: list[Namespace] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for site, number in enumerate(hosts):
                self._add_site(site, number, mbit=mbit)
            for left in range(len(hosts) - 1):
                self._join(left, left + 1, mbit=between_mbit or mbit)
            undo.pop_all()

    @staticmethod
    @functools.cache
    def unavailable_reason() -> str:
        """Why no network can be created on this machine; empty if one can."""
        if sys.platform != "linux":
            return "network namespaces need Linux"
        if os.geteuid() != 0:
            return "network namespaces need root"
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            return f"{', '.join(missing)} is not installed (iproute2, util-linux)"
        try:
            Network(hosts=(1,), mbit=100).close()
        except UnavailableError as error:
            return str(error)
        return ""

    @property
    def sites(self) -> int:
        """Number of sites."""
        return len(self._hubs)

    def crossed_bytes(self, left: int = 0) -> tuple[int, int]:
        """Bytes over the link from a site to the next one and back, including headers."""
        leftwards, rightwards = self._hubs[left].counters(f"to{left + 1}")
        return rightwards, leftwards

    def close(self) -> None:
        """Kill the processes on its hosts; the kernel removes the rest."""
        for host in self.hosts:
            host.close()
        for hub in self._hubs:
            hub.close()
        self.hosts, self._hubs = [], []

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add_site(self, site: int, number: int, *, mbit: float) -> None:
        hub = Namespace.make()
        self._hubs.append(hub)
        hub.run("ip", ["link add br0 type bridge", "link set br0 up"])
        for _ in range(number):
            self.hosts.append(Host(len(self.hosts), site=site, hub=hub, mbit=mbit))

    def _join(self, left: int, right: int, *, mbit: float) -> None:
        one, other = self._hubs[left], self._hubs[right]
        one.run(
            "ip",
            [
                f"link add to{right} type veth peer name to{left} netns {other.path}",
                f"link set to{right} master br0 up",
            ],
        )
        other.run("ip", [f"link set to{left} master br0 up"])
        one.shape(f"to{right}", mbit)
        other.shape(f"to{left}", mbit)
