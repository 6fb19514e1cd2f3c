"""The cost of a thousand workers in function calls, and bounded tables."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from paceline.types import PolicyVersion
from paceline.weights.route import ChunkSource, TransferEvent, TransferProgress, TransferReport
from paceline_experience.fleet.routing.broadcast import Broadcast, Node
from paceline_experience.fleet.routing.links import Links
from paceline_experience.fleet.routing.members import Members

NUM_WORKERS = 1000
SEED = "http://trainer:1"


def calls(action: Callable[[], object]) -> int:
    """Number of Python function calls made by `action`."""
    count = 0

    def seen(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def node(i: int, num_sites: int = 1) -> Node:
    return Node(f"w{i}", f"http://w{i}:1", f"s{i % num_sites}")


def announce(broadcast: Broadcast, version: int) -> None:
    noun = PolicyVersion(version, step=version, num_bytes=1 << 30)
    broadcast.announce(noun, seeds=[ChunkSource(SEED)], site="s0")


@pytest.fixture(params=[1, 20], ids=["one site", "twenty sites"])
def crowd(request: pytest.FixtureRequest) -> Broadcast:
    broadcast = Broadcast(clock=lambda: 0.0)
    for i in range(NUM_WORKERS):
        broadcast.join(node(i, request.param))
    announce(broadcast, 1)
    return broadcast


@pytest.mark.parametrize("event", [TransferEvent.FAILED, TransferEvent.SLOW])
def test_a_report_does_not_scan_all_workers(crowd: Broadcast, event: TransferEvent) -> None:
    worst = 0
    for i in range(5, 405, 10):
        route = crowd.route(f"w{i}")
        assert route is not None
        report = TransferReport(f"w{i}", 1, route.sources[0].endpoint, event)
        worst = max(worst, calls(lambda r=report: crowd.report(r)))
    assert 0 < worst < 8 * NUM_WORKERS


@pytest.mark.parametrize("ready", [0, 100])
def test_leaving_and_joining_late_cost_little(ready: int) -> None:
    broadcast = Broadcast(clock=lambda: 0.0)
    announce(broadcast, 1)
    held = [TransferProgress(1, ready, 100)]

    def join() -> None:
        for i in range(NUM_WORKERS):
            broadcast.join(node(i), held)

    assert calls(join) < 2000 * NUM_WORKERS
    assert calls(lambda: broadcast.leave("w0")) < NUM_WORKERS
    assert calls(lambda: broadcast.route("w1")) < 8 * NUM_WORKERS


def test_late_joiners_share_many_complete_peers(crowd: Broadcast) -> None:
    for i in range(NUM_WORKERS):
        crowd.progress(f"w{i}", [TransferProgress(1, 100, 100)])
    parents = set[str]()
    for i in range(NUM_WORKERS, NUM_WORKERS + 200):
        crowd.join(node(i))
        route = crowd.route(f"w{i}")
        assert route is not None
        parents.add(route.sources[0].endpoint)
    assert len(parents) == 200
    assert SEED not in parents


def test_only_the_last_senders_of_a_receiver_are_remembered() -> None:
    links = Links()
    for i in range(1, 100):
        links.observe(node(i), node(0), wire_bytes=1000 * i, busy_s=1.0)
        links.observe_latency(node(i), node(0), 0.5)
    assert links.measured(node(99), node(0)) == 99_000
    assert [i for i in range(1, 100) if links.measured(node(i), node(0))] == [*range(68, 100)]
    links.forget(node(99))
    assert links.measured(node(99), node(0)) == 0
    assert links.latency(node(98), node(0)) == 0.5


def test_reports_on_strangers_are_not_kept(crowd: Broadcast) -> None:
    held = TransferReport(
        "w1", 1, "http://gone:1", TransferEvent.MOVED, wire_bytes=10**6, busy_s=1.0
    )
    before = crowd.view()
    assert not crowd.report(held)
    assert crowd.view() == before
    fresh = Broadcast(clock=lambda: 0.0)
    fresh.join(node(0))
    announce(fresh, 1)
    cut = fresh.chunk_bytes(1 << 30)
    fresh.report(
        TransferReport("w0", 1, "http://gone:1", TransferEvent.MOVED, wire_bytes=10**9, busy_s=0.1)
    )
    assert fresh.chunk_bytes(1 << 30) == cut


def test_expired_marks_are_dropped() -> None:
    now = 0.0
    members = Members(clock=lambda: now)
    for i in range(100):
        members.complain(f"http://gone{i}:1", "suspect", by="w1")
    assert members.num_marked() == 100
    now = 1000.0
    members.complain("http://w2:1", "slow", by="w1")
    assert members.num_marked() == 1
    assert members.marks("http://w2:1") == [TransferEvent.SLOW]
