"""One network namespace per pod, all on a bridge in a namespace of its own.

Only one end of a veth pair is on the machine's side, with the machine's address in the cluster. It
disappears with the bridge's namespace.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import subprocess
from pathlib import Path

from kubernetes_double.errors import UnavailableError
from kubernetes_double.patience import PATIENCE_S

ALL = ipaddress.IPv4Network("198.18.0.0/16")
_PREFIX = 22
_NAMES = Path("/run/netns")
_HUB = "hub"
_TIMEOUT_S = PATIENCE_S


class Network:
    """The addresses of one cluster: a block of 1022, the first two for machine and bridge.

    Namespaces are held by mounts below a private /run/netns in the mount namespace of this process,
    so that they end with it.
    """

    def __init__(self, *, chance: random.Random) -> None:
        self._block, self._interface = _claim(chance)
        self._free = [str(address) for address in self._block.hosts()]
        self.gateway = self._free.pop(0)
        self._router = self._free.pop(0)
        _run_now(
            f"ip link set {self._interface} up",
            f"ip addr add {self.gateway}/{_PREFIX} dev {self._interface}",
            f"ip -n {_HUB} addr add {self._router}/{_PREFIX} dev br0",
            f"ip netns exec {_HUB} sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'",
        )

    async def join(self, name: str) -> str:
        """Create a pod's namespace; returns its address."""
        address = self._free.pop(0)
        # Must not be a keyword of `ip`, such as `vf`.
        port = f"pod{int(ipaddress.ip_address(address)) & 0xFFFF}"
        await _run(
            f"ip netns add {name}",
            f"ip link add {port} netns {_HUB} type veth peer name eth0 netns {name}",
            f"ip -n {_HUB} link set {port} master br0 up",
            f"ip -n {name} link set lo up",
            f"ip -n {name} addr add {address}/{_PREFIX} dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} route add default via {self._router}",
        )
        return address

    async def translate(self, rules: str) -> None:
        """Replace the bridge's table of address translations."""
        await _run(f"ip netns exec {_HUB} iptables-restore <<'END'\n{rules}END")

    async def leave(self, name: str, address: str) -> None:
        """Release address and namespace; the address is reused last."""
        await _run(f"ip netns del {name}")
        self._free.append(address)

    def close(self) -> None:
        """Remove the machine's end of the veth pair; the rest ends with the process."""
        _run_now(f"ip link del {self._interface}")

    @staticmethod
    def path(name: str) -> str:
        """The file through which a pod's namespace can be entered."""
        return str(_NAMES / name)


def hide_run() -> None:
    """Mount a private /run, which `ip netns` writes to.

    Only for a process in its own mount namespace.
    """
    _run_now("mount -t tmpfs run /run", f"mkdir {_NAMES}")


def _claim(chance: random.Random) -> tuple[ipaddress.IPv4Network, str]:
    """Claim a block that no other cluster has, by creating an interface named after it."""
    blocks = list(enumerate(ALL.subnets(new_prefix=_PREFIX)))
    chance.shuffle(blocks)
    _run_now(
        f"ip netns add {_HUB}",
        f"ip -n {_HUB} link add br0 type bridge",
        f"ip -n {_HUB} link set br0 up",
    )
    for number, block in blocks:
        name = f"double{number}"
        made = subprocess.run(
            ["ip", "link", "add", name, "type", "veth", "peer", "name", "up0", "netns", _HUB],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if made.returncode == 0:
            _run_now(f"ip -n {_HUB} link set up0 master br0 up")
            return block, name
    raise UnavailableError(f"all {len(blocks)} address blocks of {ALL} are taken")


def _run_now(*commands: str) -> None:
    done = subprocess.run(
        ["sh", "-ec", "\n".join(commands)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"{'; '.join(commands)}: {done.stderr.strip()}")


async def _run(*commands: str) -> None:
    await asyncio.to_thread(_run_now, *commands)
