"""Broadcasts over slow links while hosts die, freeze, slow down, join late or damage bytes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline_harness.fleet import JOB, Fleet, Program
from paceline_harness.network import Network
from paceline_harness.patience import PATIENCE_S

PROGRAMS = Path(__file__).resolve().parents[2] / "benchmarks" / "fleet"
SIZE = 12 << 20
MBIT = 100
TIMEOUT_S = PATIENCE_S
HELD, SOME = 0.6, 0.3  # shares of a version
TRIES = 5
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
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


def midway(fleet: Fleet, *, seed: int = 1) -> int:
    """Publish a version that is held back midway until `release`."""
    version = fleet.publish(SIZE, held_at=HELD, seed=seed)["version"]
    fleet.until(
        lambda: min(fleet.ready_share(w, version) for w in fleet.workers.values()) >= SOME,
        "every worker has some",
        timeout_s=TIMEOUT_S,
    )
    return version


def heard(fleet: Fleet, version: int) -> None:
    """Wait until the tracker knows that all hold a version."""
    fleet.until(
        lambda: all(fleet.members().get(name) == version for name in fleet.workers),
        "all have told that they hold it",
        timeout_s=TIMEOUT_S,
    )


def keeps_within(
    fleet: Fleet, sent: Callable[[], Sequence[int]], bounds: Sequence[tuple[float, float]]
) -> None:
    """The number of copies sent over links during a broadcast.

    A machine that holds a process up for long makes its peers look elsewhere for the bytes, and
    that is as it should be: if a worker has complained of another, the next version counts.
    """
    for seed in range(1, 1 + TRIES):
        before, told = sent(), complaints(fleet)
        all_end_well(fleet, fleet.publish(SIZE, seed=seed)["version"])
        copies = [(new - old) / SIZE for new, old in zip(sent(), before, strict=True)]
        if all(low < each < high for each, (low, high) in zip(copies, bounds, strict=True)):
            return
        assert complaints(fleet) != told, f"{copies} copies went over links, of {bounds}"
    pytest.fail(f"somebody complained each time: {complaints(fleet)}")


def complaints(fleet: Fleet) -> dict[str, dict[str, float]]:
    return {name: worker.ask("counts")["events"] for name, worker in fleet.workers.items()}


def all_end_well(fleet: Fleet, version: int, *, but: Program | None = None) -> None:
    """All workers, or all others, end with the trainer's bytes."""
    workers = [each for each in fleet.workers.values() if each is not but]
    fleet.arrivals(version, timeout_s=TIMEOUT_S, workers=workers)
    assert fleet.digests_agree(version, workers)


def copies(fleet: Fleet) -> dict[str, float]:
    """Total copies of a snapshot that workers pulled from each other."""
    return {name: w.ask("counts")["in_bytes"] / SIZE for name, w in fleet.workers.items()}


def test_the_trainer_uploads_about_one_copy_and_then_what_changed(start: Start) -> None:
    fleet = start()
    host = fleet.seeds[0].host
    keeps_within(fleet, lambda: [host.sent_bytes()], [(0.9, 1.5)])
    first = fleet.publish(SIZE, seed=1, change=1e-6)["version"]
    all_end_well(fleet, first)
    heard(fleet, first)
    before = host.sent_bytes()
    all_end_well(fleet, fleet.publish(SIZE, seed=1, change=1e-6)["version"])
    assert host.sent_bytes() - before < 0.5 * SIZE


def test_a_slow_link_between_sites_is_crossed_once(start: Start) -> None:
    fleet = start(hosts=(3, 3), between_mbit=40)
    keeps_within(fleet, fleet.network.crossed_bytes, [(0.9, 1.3), (0.0, 0.3)])


@pytest.mark.extended
def test_two_seeds_share_the_upload(start: Start) -> None:
    fleet = start(seeds=2)
    hosts = [seed.host for seed in fleet.seeds]
    keeps_within(fleet, lambda: [host.sent_bytes() for host in hosts], [(0.3, 0.9), (0.3, 0.9)])


def test_a_relay_is_killed(start: Start) -> None:
    fleet = start()
    version = midway(fleet)
    relay = fleet.relay(version)
    relay.kill()
    fleet.release()
    all_end_well(fleet, version, but=relay)
    del fleet.workers[relay.name]
    assert max(copies(fleet).values()) < 1.3, "began again from zero"


def test_a_relay_freezes_and_resumes_later(start: Start) -> None:
    fleet = start()
    version = midway(fleet)
    relay = fleet.relay(version)
    relay.freeze()
    fleet.release()
    all_end_well(fleet, version, but=relay)
    relay.thaw()
    all_end_well(fleet, version)
    assert max(copies(fleet).values()) < 1.3, "began again from zero"


@pytest.mark.extended
def test_a_relay_becomes_slow(start: Start) -> None:
    fleet = start()
    version = midway(fleet)
    fleet.relay(version).host.set_rate(MBIT / 10)
    fleet.release()
    all_end_well(fleet, version)
    assert max(copies(fleet).values()) < 1.3, "began again from zero"


@pytest.mark.extended
def test_a_link_is_cut_and_mended(start: Start) -> None:
    fleet = start()
    version = midway(fleet)
    relay = fleet.relay(version)
    relay.host.cut()
    fleet.release()
    all_end_well(fleet, version, but=relay)
    relay.host.mend()
    all_end_well(fleet, version)


def test_workers_join_late(start: Start) -> None:
    fleet = start(hosts=(6,), late=2)
    version = midway(fleet)
    fleet.add_workers(fleet.network.hosts[-2:])
    fleet.release()
    all_end_well(fleet, version)
    assert fleet.seeds[0].host.sent_bytes() < 2.5 * SIZE


@pytest.mark.extended
def test_a_newer_version_comes_halfway(start: Start) -> None:
    fleet = start()
    older = midway(fleet)
    newer = fleet.publish(SIZE, seed=2)["version"]
    fleet.release()
    assert newer > older
    all_end_well(fleet, newer)
    assert max(copies(fleet).values()) < 2.3


def test_a_host_that_damages_bytes_is_dropped(start: Start) -> None:
    fleet = start(late=4)
    (damages,) = fleet.add_workers(fleet.network.hosts[1:2], damages=1)  # first in the chain
    others = fleet.add_workers(fleet.network.hosts[2:])
    fleet.settle(timeout_s=TIMEOUT_S)
    all_end_well(fleet, fleet.publish(SIZE, seed=1)["version"])
    assert sum(each.ask("counts")["events"].get("damaged", 0) for each in others) > 0
    endpoint = damages.wait("ready", timeout_s=TIMEOUT_S)["endpoint"]
    fleet.until(
        lambda: "damaged" in fleet.tracker.ask("weights", job_id=JOB)["troubles"][endpoint],
        "the tracker is told",
        timeout_s=TIMEOUT_S,
    )
