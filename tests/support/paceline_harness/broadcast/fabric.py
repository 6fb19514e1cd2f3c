"""Hosts, their links, and lower bounds on the time of a broadcast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with its egress and ingress rates in bytes per second."""

    name: str
    site: str
    up: float
    down: float


@dataclass(frozen=True, slots=True)
class Wire:
    """The link from one site to another, shared by all flows between them."""

    bytes_per_s: float
    latency_s: float = 0.02


@dataclass(slots=True)
class Fabric:
    """Hosts by name and wires by pair of sites; pairs without their own wire use `default`."""

    hosts: dict[str, Host]
    wires: Mapping[tuple[str, str], Wire] = field(default_factory=dict[tuple[str, str], Wire])
    default: Wire = Wire(float("inf"))
    near_latency_s: float = 0.0005

    def wire(self, sender: Host, receiver: Host) -> Wire | None:
        """The wire between two hosts; None if they are at the same site."""
        if sender.site == receiver.site:
            return None
        return self.wires.get((sender.site, receiver.site), self.default)

    def latency_s(self, sender: Host, receiver: Host) -> float:
        """One-way latency."""
        wire = self.wire(sender, receiver)
        return self.near_latency_s if wire is None else wire.latency_s

    def alone(self, sender: Host, receiver: Host) -> float:
        """Bytes per second of a flow without competing flows."""
        wire = self.wire(sender, receiver)
        return min(sender.up, receiver.down, wire.bytes_per_s if wire else float("inf"))

    def bound_s(self, num_bytes: int) -> float:
        """A lower bound in seconds for any tree: the slowest receiver over its widest path.

        That is the general formula for infinitely small chunks without latency: bytes divided by
        the rate of the slowest edge of the widest spanning tree.
        """
        width = {name: 0.0 for name in self.hosts if name != TRAINER}
        trainer = self.hosts[TRAINER]
        for name in width:
            width[name] = self.alone(trainer, self.hosts[name])
        worst, reached = float("inf"), set[str]()
        while len(reached) < len(width):
            best = max((n for n in width if n not in reached), key=width.__getitem__)
            reached.add(best)
            worst = min(worst, width[best])
            for name in width.keys() - reached:
                through = min(width[best], self.alone(self.hosts[best], self.hosts[name]))
                width[name] = max(width[name], through)
        return num_bytes / worst if width else 0.0

    def fanout_s(self, num_bytes: int) -> float:
        """Seconds for the trainer alone to send everyone a copy."""
        trainer = self.hosts[TRAINER]
        workers = [host for host in self.hosts.values() if host.name != TRAINER]
        seconds = len(workers) * num_bytes / trainer.up
        for site, count in Counter(host.site for host in workers).items():
            some = next(host for host in workers if host.site == site)
            wire = self.wire(trainer, some)
            if wire is not None:
                seconds = max(seconds, count * num_bytes / wire.bytes_per_s)
        return max([seconds, *(num_bytes / host.down for host in workers)])


def star(num_workers: int, *, mbit: float) -> Fabric:
    """A trainer and workers at one site, all with equal links."""
    rate = mbit * 1e6 / 8
    names = [TRAINER, *(f"w{i:04d}" for i in range(num_workers))]
    return Fabric({name: Host(name, "site00", rate, rate) for name in names})


def sites(
    num_sites: int, per_site: int, *, mbit: float, between_mbit: float, latency_s: float = 0.05
) -> Fabric:
    """Sites of equal hosts, with one wire per direction between any two sites."""
    rate = mbit * 1e6 / 8
    hosts = {TRAINER: Host(TRAINER, "site00", rate, rate)}
    for s in range(num_sites):
        for i in range(per_site):
            name = f"s{s:02d}w{i:03d}"
            hosts[name] = Host(name, f"site{s:02d}", rate, rate)
    return Fabric(hosts, default=Wire(between_mbit * 1e6 / 8, latency_s))
