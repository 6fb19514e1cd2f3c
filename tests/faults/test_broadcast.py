"""Weights go out over slow links while hosts die, freeze, slow down, join late or damage bytes."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.fleet import JOB, Fleet, Program
from paceline.testing.network import Network

PROGRAMS = Path(__file__).resolve().parents[2] / "benchmarks" / "fleet"
SIZE = 12 << 20
MBIT = 100
TIMEOUT_S = 120.0
pytestmark = pytest.mark.slow
Start = Callable[..., Fleet]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a trainer and workers on the hosts of a new network."""
    if reason := Network.unavailable_reason():
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(
            *, hosts: tuple[int, ...] = (5,), seeds: int = 1, late: int = 0, **network: Any
        ) -> Fleet:
            made = stack.enter_context(Network(hosts=hosts, mbit=MBIT, **network))
            fleet = Fleet(network=made, programs=PROGRAMS, logs=tmp_path)
            stack.enter_context(fleet)
            fleet.add_seeds(made.hosts[:seeds])
            fleet.add_workers(made.hosts[seeds : len(made.hosts) - late])
            fleet.settle(timeout_s=TIMEOUT_S)
            return fleet

        yield make


def midway(fleet: Fleet, version: int, share: float = 0.3) -> None:
    """Until the worker that has least has some, and nobody is through."""
    fleet.until(
        lambda: min(fleet.ready_share(w, version) for w in fleet.workers.values()) >= share,
        "every worker has some",
        timeout_s=TIMEOUT_S,
    )


def all_end_well(fleet: Fleet, version: int, *, but: Program | None = None) -> None:
    """Everyone, or everyone else, ends on the trainer's bytes."""
    workers = [each for each in fleet.workers.values() if each is not but]
    fleet.arrivals(version, timeout_s=TIMEOUT_S, workers=workers)
    assert fleet.digests_agree(version, workers)


def copies(fleet: Fleet) -> dict[str, float]:
    """Copies of a snapshot that each worker took from others, all told."""
    return {name: w.ask("counts")["in_bytes"] / SIZE for name, w in fleet.workers.items()}


def test_the_trainer_uploads_about_one_copy(start: Start) -> None:
    fleet = start()
    all_end_well(fleet, fleet.publish(SIZE, seed=1)["version"])
    assert fleet.seeds[0].host.sent_bytes() < 1.5 * SIZE


def test_a_slow_link_between_sites_is_crossed_once(start: Start) -> None:
    fleet = start(hosts=(3, 3), between_mbit=40)
    all_end_well(fleet, fleet.publish(SIZE, seed=1)["version"])
    there, back = fleet.network.crossed_bytes()
    assert there < 1.3 * SIZE
    assert back < 0.3 * SIZE


def test_two_seeds_share_the_upload(start: Start) -> None:
    fleet = start(seeds=2)
    all_end_well(fleet, fleet.publish(SIZE, seed=1)["version"])
    for seed in fleet.seeds:
        assert 0.3 * SIZE < seed.host.sent_bytes() < 0.9 * SIZE


def test_a_relay_is_killed(start: Start) -> None:
    fleet = start()
    version = fleet.publish(SIZE, seed=1)["version"]
    midway(fleet, version)
    relay = fleet.relay(version)
    relay.kill()
    all_end_well(fleet, version, but=relay)
    del fleet.workers[relay.name]
    assert max(copies(fleet).values()) < 1.3, "began again from zero"


def test_a_relay_freezes_and_goes_on_later(start: Start) -> None:
    fleet = start()
    version = fleet.publish(SIZE, seed=1)["version"]
    midway(fleet, version)
    relay = fleet.relay(version)
    relay.freeze()
    all_end_well(fleet, version, but=relay)
    relay.thaw()
    all_end_well(fleet, version)
    assert max(copies(fleet).values()) < 1.3, "began again from zero"


def test_a_relay_becomes_slow(start: Start) -> None:
    fleet = start()
    version = fleet.publish(SIZE, seed=1)["version"]
    midway(fleet, version)
    fleet.relay(version).host.set_rate(MBIT / 10)
    all_end_well(fleet, version)
    assert max(copies(fleet).values()) < 1.3, "began again from zero"


def test_a_link_is_cut_and_mended(start: Start) -> None:
    fleet = start()
    version = fleet.publish(SIZE, seed=1)["version"]
    midway(fleet, version)
    relay = fleet.relay(version)
    relay.host.cut()
    all_end_well(fleet, version, but=relay)
    relay.host.mend()
    all_end_well(fleet, version)


def test_workers_join_late(start: Start) -> None:
    fleet = start(hosts=(6,), late=2)
    version = fleet.publish(SIZE, seed=1)["version"]
    midway(fleet, version)
    fleet.add_workers(fleet.network.hosts[-2:])
    all_end_well(fleet, version)
    assert fleet.seeds[0].host.sent_bytes() < 2.5 * SIZE


def test_a_newer_version_comes_halfway(start: Start) -> None:
    fleet = start()
    older = fleet.publish(SIZE, seed=1)["version"]
    midway(fleet, older)
    newer = fleet.publish(SIZE, seed=2)["version"]
    assert newer > older
    all_end_well(fleet, newer)
    assert max(copies(fleet).values()) < 2.3


def test_a_version_that_changed_little_takes_few_bytes(start: Start) -> None:
    fleet = start()
    first = fleet.publish(SIZE, seed=1, change=1e-6)["version"]
    all_end_well(fleet, first)
    time.sleep(1.5)  # beats tell the tracker who holds it
    before = fleet.seeds[0].host.sent_bytes()
    all_end_well(fleet, fleet.publish(SIZE, seed=1, change=1e-6)["version"])
    assert fleet.seeds[0].host.sent_bytes() - before < 0.5 * SIZE


def test_a_host_that_damages_bytes_is_dropped(start: Start) -> None:
    fleet = start(late=4)
    (damages,) = fleet.add_workers(fleet.network.hosts[1:2], damages=1)  # first in the chain
    others = fleet.add_workers(fleet.network.hosts[2:])
    fleet.settle(timeout_s=TIMEOUT_S)
    all_end_well(fleet, fleet.publish(SIZE, seed=1)["version"])
    assert sum(each.ask("counts")["events"].get("damaged", 0) for each in others) > 0
    endpoint = damages.wait("ready", timeout_s=1.0)["endpoint"]
    troubles = fleet.tracker.ask("weights", job_id=JOB)["troubles"]
    assert "damaged" in troubles[endpoint]
