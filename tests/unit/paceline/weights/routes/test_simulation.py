"""The tracker in simulated networks: as fast as predicted, and all get the newest version."""

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.weights import cost
from paceline_experience.fleet.routing.links import Links, Node
from paceline_experience.fleet.routing.plan import BroadcastLoad, Root, candidates, choose, predict
from paceline_experience.fleet.routing.tree import ROOT
from paceline_harness.broadcast.fabric import TRAINER, Fabric, Host, Wire, sites, star
from paceline_harness.broadcast.flows import Flows
from paceline_harness.broadcast.rows import measure, scenarios
from paceline_harness.broadcast.simulation import Simulation, endpoint

MIB = 1 << 20
SIZE = 256 * MIB
MBIT = 1e6 / 8


def chain(simulation: Simulation) -> list[str]:
    """Workers by distance from the trainer, in a chain."""
    routes = {name: simulation.broadcast.route(name) for name in simulation.receivers}
    senders = {r.sources[0].endpoint: name for name, r in routes.items() if r is not None}
    names, at = list[str](), endpoint(TRAINER)
    while at in senders:
        names.append(senders[at])
        at = endpoint(names[-1])
    return names


def spread(
    fabric: Fabric, happens: Callable[[Simulation, float], None], *, num_bytes: int = SIZE
) -> tuple[Simulation, float]:
    """Publish version 2 after version 1 has revealed the links; returns the time of publication."""
    simulation = Simulation(fabric)
    simulation.publish(1, num_bytes)
    simulation.run()
    simulation.run(past=simulation.now + 3, until=simulation.now + 3)
    begin = simulation.now
    simulation.publish(2, num_bytes)
    happens(simulation, begin)
    simulation.run(past=begin + 9, until=begin + 300)
    assert simulation.complete()
    return simulation, begin


def last(simulation: Simulation, begin: float, *, but: str = "", version: int = 2) -> float:
    alive = [r for n, r in simulation.receivers.items() if n not in simulation.dead and n != but]
    return max(r.done_at.get(version, float("inf")) for r in alive) - begin


def test_a_chain_takes_what_the_formula_says() -> None:
    fabric = star(8, mbit=10_000)
    fabric.near_latency_s = 0.0
    flows = Flows(fabric)
    flows.seed(TRAINER, 1, num_chunks=50, chunk_bytes=16e9 / 50)
    sender = TRAINER
    for name in sorted(fabric.hosts.keys() - {TRAINER}):
        flows.open((name, 1), num_chunks=50, chunk_bytes=16e9 / 50)
        flows.connect((name, 1), sender, 0.0)
        sender = name
    flows.settle(0.0)
    formula = cost.chain_s(8, 50, num_bytes=16e9, bytes_per_s=1.25e9, start_s=0.0)
    assert flows.flows["w0007", 1].end == pytest.approx(formula)


def test_a_star_is_as_fast_as_one_link() -> None:
    simulation, begin = spread(star(7, mbit=200), lambda s, t: None)
    assert last(simulation, begin) < 1.03 * simulation.fabric.bound_s(SIZE)
    assert simulation.copies(2) == 1


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("fault", ["kill", "freeze", "spoil"])
def test_one_fault_costs_under_a_second(fault: str, place: int) -> None:
    victim = ""

    def strike(simulation: Simulation) -> None:
        nonlocal victim
        victim = chain(simulation)[place]
        getattr(simulation, fault)(victim)

    simulation, begin = spread(star(7, mbit=200), lambda s, t: s.at(t + 4, lambda: strike(s)))
    assert last(simulation, begin, but=victim) < 10.9 + 1
    assert simulation.copies(2) < 1.1


@pytest.mark.parametrize("place", [0, 3])
def test_a_slow_relay_does_not_delay_others(place: int) -> None:
    victim = ""

    def strike(simulation: Simulation) -> None:
        nonlocal victim
        victim = chain(simulation)[place]
        simulation.limit(victim, 20 * MBIT)

    simulation, begin = spread(star(7, mbit=200), lambda s, t: s.at(t + 4, lambda: strike(s)))
    assert last(simulation, begin, but=victim) < 10.9 + 2


def test_a_worker_slow_from_the_start_delays_only_itself() -> None:
    fabric = star(6, mbit=200)
    fabric.hosts["w0001"] = Host("w0001", "site00", 20 * MBIT, 20 * MBIT)
    simulation = Simulation(fabric)
    simulation.publish(1, SIZE)
    simulation.run(until=300)
    assert simulation.complete()
    assert last(simulation, 0, but="w0001", version=1) < 10.9 + 5


def test_late_joiners_do_not_load_the_trainer() -> None:
    def later(simulation: Simulation, begin: float) -> None:
        for i in (4, 5):
            host = Host(f"x{i}", "site00", 200 * MBIT, 200 * MBIT)
            simulation.at(begin + i, lambda h=host: simulation.join(h))

    simulation, begin = spread(star(7, mbit=200), later)
    assert last(simulation, begin) < 5 + 1.03 * simulation.fabric.bound_s(SIZE)
    assert simulation.copies(2) == 1


@pytest.mark.parametrize(("when", "ends"), [(3.0, 3 + 11.1), (8.0, 11.1 + 11.1)])
def test_a_newer_version_supersedes(when: float, ends: float) -> None:
    simulation, begin = spread(
        star(7, mbit=200), lambda s, t: s.at(t + when, lambda: s.publish(3, SIZE))
    )
    assert last(simulation, begin, version=3) < ends
    finished = sum(2 in r.done_at for r in simulation.receivers.values())
    assert finished == (0 if when < 5 else 7)


def test_a_slow_link_between_sites_is_crossed_once_even_if_its_gateway_dies() -> None:
    def strike(simulation: Simulation) -> None:
        inside = [n for n in chain(simulation) if n.startswith("s01")]
        simulation.kill(inside[0])

    fabric = sites(2, 4, mbit=1000, between_mbit=50)
    simulation, begin = spread(
        fabric, lambda s, t: s.at(t + 4, lambda: strike(s)), num_bytes=64 * MIB
    )
    assert last(simulation, begin) < 1.05 * fabric.bound_s(64 * MIB)
    num_chunks = len(simulation.flows.flows[TRAINER, 2].times)
    assert simulation.flows.crossed["site00", "site01", 2] <= num_chunks + 2


def test_deltas_of_a_quarter_take_a_quarter_of_the_time() -> None:
    simulation = Simulation(star(7, mbit=200), ratio=0.25)
    simulation.publish(1, SIZE)
    simulation.run(past=15, until=15)
    begin = simulation.now
    simulation.publish(2, SIZE)
    simulation.run()
    assert last(simulation, begin) < 0.28 * simulation.fabric.bound_s(SIZE)


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    rng = random.Random(draw(st.integers(0, 10**6)))
    num_sites, per_site = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    fabric = sites(num_sites, per_site, mbit=1000, between_mbit=100)
    for name, host in fabric.hosts.items():
        rate = rng.uniform(100, 1000) * MBIT
        fabric.hosts[name] = Host(name, host.site, rate, rate)
    fabric.default = Wire(rng.uniform(50, 400) * MBIT, rng.uniform(0.001, 0.1))
    return fabric


def links_of(fabric: Fabric) -> Links:
    """The tracker's state when everything has been measured."""
    links = Links()
    hosts = [Node(h.name, endpoint(h.name), h.site) for h in fabric.hosts.values()]
    for node in hosts:  # the uplink of a site's only worker cannot be measured
        mate, host = Node("mate", endpoint("mate"), node.site), fabric.hosts[node.worker_id]
        links.observe(node, mate, wire_bytes=int(host.up), busy_s=1.0)
        links.observe(mate, node, wire_bytes=int(host.down), busy_s=1.0)
        links.forget(mate)
    for sender in hosts:
        for receiver in hosts:
            if sender is not receiver:
                ends = fabric.hosts[sender.worker_id], fabric.hosts[receiver.worker_id]
                rate = fabric.alone(*ends)
                links.observe(sender, receiver, wire_bytes=int(rate), busy_s=1.0)
                links.observe_latency(sender, receiver, fabric.latency_s(*ends))
    return links


def only_workers_of_their_sites() -> Fabric:
    """Nodes with less uplink than two inter-site wires can carry."""
    fabric = sites(5, 1, mbit=1000, between_mbit=324, latency_s=0.031)
    for name, mbit in (("s01w000", 478), ("s02w000", 333), ("s03w000", 560), ("s04w000", 464)):
        fabric.hosts[name] = Host(name, fabric.hosts[name].site, mbit * MBIT, mbit * MBIT)
    return fabric


@settings(max_examples=25, deadline=None)
@example(fabric=only_workers_of_their_sites())
@given(fabric=fabrics())
def test_plans_take_the_predicted_time_and_the_best_is_chosen(fabric: Fabric) -> None:
    links, load = links_of(fabric), BroadcastLoad(64 * MIB, 128)
    nodes = {h.name: Node(h.name, endpoint(h.name), h.site) for h in fabric.hosts.values()}
    root = Root(nodes.pop(TRAINER), links.up(Node("", endpoint(TRAINER), "site00")))
    order = sorted(nodes.values(), key=lambda n: -links.relay(n))
    took: list[float] = []
    for plan in candidates(order, root.node, links=links):
        flows = Flows(fabric)
        flows.seed(TRAINER, 1, num_chunks=128, chunk_bytes=load.chunk_bytes)
        for name in plan.parents:
            flows.open((name, 1), num_chunks=128, chunk_bytes=load.chunk_bytes)
        for name, parent in plan.parents.items():
            flows.connect((name, 1), TRAINER if parent == ROOT else parent, 0.0)
        now = 0.0
        while changed := flows.settle(now) or any(f.end > now for f in flows.flows.values()):
            now = min(f.end for f in flows.flows.values() if f.end > now)
            for key in [k for k, f in flows.flows.items() if f.end == now]:
                flows.finished(key)
            assert changed
        predicted = predict(plan.parents, order, root, links=links, load=load)
        assert now <= predicted * 1.10
        took.append(now)
    chosen = choose(order, root, links=links, load=load)
    assert chosen.predicted_s <= min(took) * 1.25


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    faults=st.lists(
        st.tuples(
            st.sampled_from(["kill", "freeze", "limit", "spoil", "join", "publish", "leave"]),
            st.floats(0.0, 14.0),
        ),
        max_size=8,
    ),
)
def test_every_live_worker_always_gets_the_newest_version(
    seed: int, faults: list[tuple[str, float]]
) -> None:
    rng = random.Random(seed)
    simulation = Simulation(sites(3, 5, mbit=400, between_mbit=200, latency_s=0.02))
    simulation.publish(1, SIZE)
    count = {"publish": 1, "join": 0, "hit": 0}

    def strike(fault: str) -> None:
        healthy = sorted(
            n
            for n in simulation.receivers
            if n not in simulation.dead | simulation.flows.stopped | simulation.flows.spoiled
        )
        if fault == "publish":
            count["publish"] += 1
            simulation.publish(count["publish"], SIZE)
        elif fault == "join":
            count["join"] += 1
            site = f"site{rng.randrange(3):02d}"
            simulation.join(Host(f"x{count['join']}", site, 400 * MBIT, 400 * MBIT))
        elif len(healthy) > 4:
            count["hit"] += 1
            name = rng.choice(healthy)
            if fault == "limit":
                simulation.limit(name, 40 * MBIT)
            elif fault == "leave":
                simulation.kill(name, notice=True)
            else:
                getattr(simulation, fault)(name)

    for fault, when in faults:
        simulation.at(when, lambda f=fault: strike(f))
    simulation.run(past=15, until=600)
    assert simulation.complete()
    # at worst, each fault makes another worker pull the missing chunks from the trainer
    for version in range(1, count["publish"] + 1):
        assert simulation.copies(version) <= 1.05 + count["hit"]


@pytest.mark.parametrize("scenario", scenarios(quick=True), ids=lambda s: s.name)
def test_scenarios_stay_near_the_bound(scenario: object) -> None:
    row = measure(scenario)  # type: ignore[arg-type]
    assert row["digest_ok"]
    assert float(row["seconds"]) <= 1.2 * float(row["bound_seconds"])
    assert float(row["fanout_seconds"]) >= 3.5 * float(row["seconds"])
    assert float(row["trainer_copies"]) <= 2
    assert float(row["most_crossings"]) <= 1.1
