"""Broadcasts over networks of namespaces, with and without disturbances."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline_harness.fleet import Fleet, Program
from paceline_harness.network import Host, Network

MIB = 1 << 20
WAIT_S = 600.0
SLOW_MBIT = 20.0
FROZEN_S = 3.0
SETTLE_S = 1.0  # for reports and heartbeats of the previous version
PROGRAMS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Scenario:
    """One broadcast. The first host is the trainer; `late` of the others join midway."""

    name: str
    mib: int
    mbit: float = 200.0
    hosts: tuple[int, ...] = (8,)
    between_mbit: float | None = None
    seeds: int = 1
    seed_mbit: float = 0.0  # 0: like all others
    late: int = 0
    disturb: Callable[[Run], None] | None = None
    fans_out: bool = False  # also measure direct fan-out
    change: float = 0.0  # learning rate of the step between two versions; 0: unrelated bytes

    @property
    def num_bytes(self) -> int:
        """Size of a snapshot."""
        return self.mib * MIB


@dataclass(slots=True)
class Run:
    """A broadcast in progress."""

    scenario: Scenario
    fleet: Fleet
    version: int
    published: dict[str, Any]
    spared: list[Program] = field(default_factory=list[Program])  # alive and undisturbed
    late: list[Host] = field(default_factory=list[Host])
    joined_s: float = 0.0

    def midway(self, worker: Program, share: float = 0.5) -> None:
        """Wait until a worker has this share of the version."""
        self.fleet.until(
            lambda: self.fleet.ready_share(worker, self.version) >= share,
            f"{worker.name} has {share:.0%} of version {self.version}",
            timeout_s=WAIT_S,
        )

    def relay(self) -> Program:
        """Choose a worker in the middle of the route to disturb."""
        self.midway(self.spared[-1], 0.4)
        found = self.fleet.relay(self.version)
        self.spared.remove(found)
        return found


def kill(run: Run) -> None:
    """Kill a relay with SIGKILL."""
    relay = run.relay()
    relay.kill()
    del run.fleet.workers[relay.name]


def freeze(run: Run) -> None:
    """Freeze a relay for some seconds."""
    relay = run.relay()
    relay.freeze()
    time.sleep(FROZEN_S)
    relay.thaw()


def slow(run: Run) -> None:
    """Slow down the link of a relay in both directions."""
    relay = run.relay()
    relay.host.set_rate(SLOW_MBIT)


def join(run: Run) -> None:
    """Add workers during the broadcast."""
    run.midway(run.spared[-1], 0.4)
    added = run.fleet.add_workers(run.late)
    ready_s = max(each.wait("ready", timeout_s=WAIT_S)["at_s"] for each in added)
    run.joined_s = ready_s - run.published["begin_s"]


def supersede(run: Run) -> None:
    """Publish a newer version halfway."""
    run.midway(run.spared[-1], 0.5)
    run.published = run.fleet.publish(run.scenario.num_bytes, seed=run.version + 1)
    run.version = run.published["version"]


@contextmanager
def fleet_on(network: Network, scenario: Scenario) -> Generator[Fleet]:
    """All programs of a scenario, started and in the roster."""
    with (
        TemporaryDirectory() as logs,
        Fleet(network=network, programs=PROGRAMS, logs=Path(logs)) as fleet,
    ):
        fleet.add_seeds(network.hosts[: scenario.seeds])
        last = len(network.hosts) - scenario.late
        fleet.add_workers(network.hosts[scenario.seeds : last])
        fleet.settle(timeout_s=WAIT_S)
        yield fleet


def measure(scenario: Scenario, rounds: int) -> list[dict[str, Any]]:
    """Times of each round by worker, and whether the right bytes arrived.

    Undisturbed rounds share one fleet, with one version per round.
    """
    if scenario.disturb is not None:
        return [found for _ in range(rounds) for found in _measure(scenario, 1)]
    return _measure(scenario, rounds)


def _measure(scenario: Scenario, rounds: int) -> list[dict[str, Any]]:
    with (
        Network(
            hosts=scenario.hosts, mbit=scenario.mbit, between_mbit=scenario.between_mbit
        ) as network,
        fleet_on(network, scenario) as fleet,
    ):
        for host in network.hosts[: scenario.seeds] if scenario.seed_mbit else []:
            host.set_rate(scenario.seed_mbit, down_mbit=scenario.mbit)
        # Warm up: links get measured, memory gets used, and deltas get a base.
        first = fleet.publish(scenario.num_bytes, seed=0, change=scenario.change)
        fleet.arrivals(first["version"], timeout_s=WAIT_S)
        found = [_broadcast(fleet, scenario, 1 + number) for number in range(rounds)]
        if scenario.fans_out:
            fanout_s = _fan_out(fleet, scenario)
            found = [{**each, "fanout_seconds": fanout_s} for each in found]
    return found


def _broadcast(fleet: Fleet, scenario: Scenario, seed: int) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    size = scenario.num_bytes
    hosts, workers = fleet.network.hosts, list(fleet.workers.values())
    counted, cpu_s = _counters(fleet), sum(fleet.cpu_s().values())
    published = fleet.publish(size, seed=seed, change=scenario.change)
    late = hosts[len(hosts) - scenario.late :] if scenario.late else []
    run = Run(scenario, fleet, published["version"], published, workers, late)
    if scenario.disturb is not None:
        scenario.disturb(run)
    arrived = fleet.arrivals(run.version, timeout_s=WAIT_S)
    took = {name: at_s - run.published["begin_s"] for name, at_s in arrived.items()}
    filled = fleet.seeds[0].wait("filled", timeout_s=WAIT_S, version=run.version)
    cpu_s = sum(fleet.cpu_s().values()) - cpu_s
    passed = {name: now - counted.get(name, 0) for name, now in _counters(fleet).items()}
    return {
        "seconds": max(took.values()),
        "spared_seconds": max(took[worker.name] for worker in run.spared),
        "joined_s": run.joined_s,
        "digest_ok": fleet.digests_agree(run.version),
        "chunk_bytes": run.published["chunk_bytes"],
        "filled_s": filled["at_s"] - run.published["begin_s"],
        "trainer_copies": sum(passed[seed.name] for seed in fleet.seeds) / size,
        "received_copies_max": max(passed[name] for name in took) / size,
        "crossed_copies": passed.get("crossed", 0) / size,
        "cpu_s_per_gib": cpu_s / (size / 2**30) / len(took),
        "load": os.getloadavg()[0],
    }


def _fan_out(fleet: Fleet, scenario: Scenario) -> float:
    """All workers pull directly from the trainer at once, without the tracker."""
    time.sleep(SETTLE_S)
    seed = fleet.seeds[0]
    seed.ask("prepare", num_bytes=scenario.num_bytes, seed=99)
    offered = seed.ask("offer", job_id="fan-out")
    begin_s = time.monotonic()
    asked = {name: offered[name] for name in ("job_id", "endpoint", "version", "key")}
    for worker in fleet.workers.values():
        worker.tell("pull", **asked)
    ends = [each.wait("pull", timeout_s=WAIT_S)["at_s"] for each in fleet.workers.values()]
    return max(ends) - begin_s


def _counters(fleet: Fleet) -> dict[str, int]:
    """Bytes sent by seeds, received by workers, and sent to the second site."""
    found = {seed.name: seed.host.sent_bytes() for seed in fleet.seeds}
    found |= {name: worker.host.received_bytes() for name, worker in fleet.workers.items()}
    if fleet.network.sites > 1:
        found["crossed"] = fleet.network.crossed_bytes()[0]
    return found
