"""Simulates broadcast scenarios and reports each as a row of a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.weights.route import QUIET_EVENTS
from paceline_harness.broadcast.fabric import TRAINER, Fabric, Host, Wire, sites, star
from paceline_harness.broadcast.simulation import Simulation

Row = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fabric, a snapshot, and events while the snapshot is broadcast."""

    name: str
    fabric: Callable[[], Fabric]
    num_bytes: int
    link_mbit: float  # the slowest link that every worker's bytes cross
    happens: Callable[[Simulation], None] | None = None
    lasts_s: float = 0.0  # minimum duration


def rows(*, quick: bool = False) -> list[Row]:
    """Measure all scenarios in turn; `quick`: a tenth of the workers, smaller snapshots."""
    return [measure(scenario) for scenario in scenarios(quick=quick)]


def scenarios(*, quick: bool = False) -> Sequence[Scenario]:
    """Eight hosts as on the network test bed, then twenty sites: equal, unequal, and with churn."""
    per_site, num_bytes = (5, 2 * 10**9) if quick else (50, 16 * 10**9)
    stars = [
        Scenario(f"sim-star8-{mbit}", lambda m=mbit: star(7, mbit=m), 256 << 20, mbit)
        for mbit in (200, 500)
    ]
    two = Scenario("sim-two-sites", lambda: sites(2, 4, mbit=1000, between_mbit=50), 64 << 20, 50)
    twenty = "sim-sites20"
    return [
        *stars,
        two,
        Scenario(twenty, lambda: even(20, per_site), num_bytes, 1000),
        Scenario(f"{twenty}-unequal", lambda: uneven(20, per_site), num_bytes, 1000),
        Scenario(
            f"{twenty}-churn",
            lambda: even(20, per_site),
            num_bytes,
            1000,
            lambda simulation: churn(simulation, per_minute=0.05, lasts_s=120.0),
            120.0,
        ),
    ]


def measure(scenario: Scenario) -> Row:
    """Broadcast version 1, from which the tracker learns the links, then measure version 2."""
    fabric = scenario.fabric()
    num_workers = len(fabric.hosts) - 1
    bound, fanout = fabric.bound_s(scenario.num_bytes), fabric.fanout_s(scenario.num_bytes)
    simulation = Simulation(fabric)
    simulation.publish(1, scenario.num_bytes)
    simulation.run()
    simulation.run(past=simulation.now + 3, until=simulation.now + 3)
    begin, before = simulation.now, set(simulation.receivers)
    simulation.publish(2, scenario.num_bytes)
    predicted = simulation.broadcast.view().versions[0]
    if scenario.happens is not None:
        scenario.happens(simulation)
    past = begin + scenario.lasts_s
    simulation.run(past=past, until=past + 20 * bound)
    alive = [r for name, r in simulation.receivers.items() if name not in simulation.dead]
    ends = [r.done_at.get(2, float("inf")) for r in alive if r.host in before]
    return {
        "scenario": scenario.name,
        "bytes": scenario.num_bytes,
        "workers": num_workers,
        "link_mbit": scenario.link_mbit,
        "seconds": round(max(ends) - begin, 3),
        "bound_seconds": round(bound, 3),
        "fanout_seconds": round(fanout, 3),
        "digest_ok": simulation.complete(),
        "shape": predicted.shape,
        "predicted_seconds": round(predicted.predicted_s, 3),
        "trainer_copies": round(simulation.copies(2), 3),
        "most_crossings": round(most_crossings(simulation, 2), 3),
        "joined": len([r for r in alive if r.host not in before]),
        "complaints": len([r for r in simulation.reports if r.event not in QUIET_EVENTS]),
    }


def even(num_sites: int, per_site: int) -> Fabric:
    """Sites with 10 Gbit/s inside, and 1 Gbit/s and 50 ms between any two of them."""
    return sites(num_sites, per_site, mbit=10_000, between_mbit=1_000)


def uneven(num_sites: int, per_site: int, *, seed: int = 0) -> Fabric:
    """Hosts with 2.5 to 10 Gbit/s, sites with uplinks of 1 to 4 Gbit/s and 5 to 120 ms between."""
    rng = random.Random(seed)
    fabric = even(num_sites, per_site)
    gbit = 1e9 / 8
    for name, host in fabric.hosts.items():
        if name != TRAINER:
            fabric.hosts[name] = Host(
                name, host.site, rng.uniform(2.5, 10) * gbit, rng.uniform(2.5, 10) * gbit
            )
    names = sorted({host.site for host in fabric.hosts.values()})
    pairs = [(a, b) for a in names for b in names if a != b]
    wide = {name: rng.uniform(1, 4) * gbit for name in names}
    fabric.wires = {(a, b): Wire(min(wide[a], wide[b]), rng.uniform(0.005, 0.12)) for a, b in pairs}
    return fabric


def churn(simulation: Simulation, *, per_minute: float, lasts_s: float, seed: int = 0) -> None:
    """Kill this share of the workers per minute, at random times; a new one joins for each."""
    rng = random.Random(seed)
    sites_now = sorted({host.site for host in simulation.fabric.hosts.values()})
    like = next(h for h in simulation.fabric.hosts.values() if h.name != TRAINER)
    rate = per_minute * len(simulation.receivers) / 60

    def die() -> None:
        alive = sorted(simulation.receivers.keys() - simulation.dead)
        simulation.kill(rng.choice(alive))

    when, count = simulation.now, 0
    end = simulation.now + lasts_s
    while (when := when + rng.expovariate(rate)) < end:
        count += 1
        host = Host(f"new{count:04d}", rng.choice(sites_now), like.up, like.down)
        simulation.at(when, die)
        simulation.at(when, lambda h=host: simulation.join(h))


def most_crossings(simulation: Simulation, version: int) -> float:
    """Copies of the snapshot received from other sites, by the site that received the most."""
    num_chunks = len(simulation.flows.flows[TRAINER, version].times)
    into: dict[str, int] = {}
    for (sender, receiver, v), chunks in simulation.flows.crossed.items():
        if v == version and sender != receiver:
            into[receiver] = into.get(receiver, 0) + chunks
    return max(into.values(), default=0) / num_chunks
