"""Individual decisions of the tracker."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from paceline.errors import NotFoundError
from paceline.types import PolicyVersion
from paceline.weights.route import (
    ChunkSource,
    Route,
    TransferEvent,
    TransferProgress,
    TransferReport,
)
from paceline_experience.fleet.routing.broadcast import Broadcast, Node

SEED = "http://trainer:1"
MIB = 1 << 20


@dataclass
class Job:
    """A broadcast with names in place of endpoints."""

    now: float = 0.0
    broadcast: Broadcast = field(init=False)

    def __post_init__(self) -> None:
        self.broadcast = Broadcast(clock=lambda: self.now)

    def join(self, *names: str, site: str = "a") -> None:
        for name in names:
            self.broadcast.join(Node(name, f"http://{name}:1", site))

    def announce(
        self, version: int, *, seeds: Sequence[ChunkSource] = (ChunkSource(SEED),)
    ) -> None:
        noun = PolicyVersion(version, step=version, num_bytes=64 * MIB)
        self.broadcast.announce(noun, seeds=seeds, site="a")

    def route(self, name: str) -> Route:
        route = self.broadcast.route(name)
        assert route is not None
        return route

    def parent(self, name: str) -> str:
        endpoint = self.route(name).sources[0].endpoint
        return "trainer" if endpoint == SEED else endpoint.removeprefix("http://")[:-2]

    def parents(self, *names: str) -> str:
        return " ".join(self.parent(name) for name in names)

    def got(self, name: str, ready: int, *, version: int = 1, of: int = 100) -> None:
        self.broadcast.progress(name, [TransferProgress(version, ready, of)])

    def say(self, name: str, event: TransferEvent, sender: str, *, version: int = 1) -> bool:
        endpoint = SEED if sender == "trainer" else f"http://{sender}:1"
        return self.broadcast.report(TransferReport(name, version, endpoint, event))


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def chain(job: Job) -> Job:
    job.join("w1", "w2", "w3", "w4", "w5")
    job.announce(1)
    assert job.parents("w1", "w2", "w3", "w4", "w5") == "trainer w1 w2 w3 w4"
    return job


def test_no_routes_before_an_announcement(job: Job) -> None:
    job.join("w1")
    assert job.broadcast.route("w1") is None
    job.announce(1)
    assert job.broadcast.route("stranger") is None


def test_routes_are_the_same_object_until_a_change(chain: Job) -> None:
    before = [chain.route(f"w{i}") for i in range(1, 6)]
    chain.got("w1", 50)
    chain.say("w2", TransferEvent.MOVED, "w1")
    assert all(chain.route(f"w{i + 1}") is before[i] for i in range(5))


def test_fallbacks_lead_up_the_chain_to_the_seed(chain: Job) -> None:
    assert chain.route("w5").fallbacks == ("http://w3:1", "http://w2:1", "http://w1:1", SEED)


def test_late_joiner_goes_to_the_tail(chain: Job) -> None:
    before = [chain.route(f"w{i}") for i in range(1, 6)]
    chain.join("w6")
    assert chain.parent("w6") == "w5"
    assert all(chain.route(f"w{i + 1}") is before[i] for i in range(5))


def test_late_joiners_share_complete_peers(chain: Job) -> None:
    for i in range(1, 6):
        chain.got(f"w{i}", 100)
    chain.join("w6", "w7", "w8")
    parents = chain.parents("w6", "w7", "w8").split()
    assert len(set(parents)) == 3
    assert "trainer" not in parents


def test_a_leaving_worker_is_removed_from_the_chain(chain: Job) -> None:
    chain.broadcast.leave("w2")
    assert chain.parents("w1", "w3", "w4", "w5") == "trainer w1 w3 w4"
    chain.broadcast.leave("w1")
    assert chain.parents("w3", "w4", "w5") == "trainer w3 w4"


@pytest.mark.parametrize(
    "event", [TransferEvent.STALLED, TransferEvent.FAILED, TransferEvent.DAMAGED]
)
def test_a_lost_parent_moves_to_the_tail(chain: Job, event: TransferEvent) -> None:
    chain.say("w3", event, "w2")
    assert chain.parents("w1", "w2", "w3", "w4", "w5") == "trainer w5 w1 w3 w4"


def test_only_broken_routes_change(chain: Job) -> None:
    before = {name: chain.route(name) for name in ("w1", "w4", "w5")}
    chain.say("w3", TransferEvent.STALLED, "w2")
    chain.say("w3", TransferEvent.STALLED, "w2")
    assert chain.route("w1") is before["w1"]
    for name in ("w4", "w5"):
        assert chain.route(name).sources == before[name].sources


def test_a_suspect_is_not_a_source_until_it_progresses(chain: Job) -> None:
    chain.say("w5", TransferEvent.STALLED, "w4")
    chain.join("w6")
    assert chain.parent("w6") == "w5"
    chain.broadcast.leave("w6")
    chain.got("w4", 10)
    chain.got("w4", 60)
    chain.join("w7")
    assert chain.parent("w7") == "w4"


def test_slow_worker_becomes_a_leaf(chain: Job) -> None:
    chain.say("w3", TransferEvent.SLOW, "w2")
    assert chain.parents("w1", "w2", "w3", "w4", "w5") == "trainer w1 w5 w2 w4"


def test_two_complaints_of_slowness_blame_the_sender(chain: Job) -> None:
    chain.say("w3", TransferEvent.SLOW, "w2")
    chain.say("w4", TransferEvent.SLOW, "w2")
    assert chain.parents("w1", "w4", "w5", "w3") == "trainer w1 w4 w5"
    assert chain.parent("w2") == "w3"
    trouble = {h.worker_id: h.trouble for h in chain.broadcast.view().holders}
    assert (trouble["w2"], trouble["w3"]) == (TransferEvent.SLOW, "")


def test_damaged_bytes_keep_a_peer_out_for_minutes(chain: Job) -> None:
    chain.say("w3", TransferEvent.DAMAGED, "w2")
    assert all("http://w2:1" not in chain.route(f"w{i}").fallbacks for i in (1, 3, 4, 5))
    chain.now += 120
    chain.announce(2)
    assert all(chain.parent(f"w{i}") != "w2" for i in (1, 3, 4, 5))
    trouble = {h.worker_id: h.trouble for h in chain.broadcast.view().holders}
    assert trouble["w2"] == TransferEvent.DAMAGED
    chain.now += 300
    chain.announce(3)
    assert "w2" in chain.parents("w1", "w3", "w4", "w5")


def test_a_worker_that_reports_everyone_is_not_believed(chain: Job) -> None:
    for sender in ("w1", "w2", "w3"):
        chain.say("w5", TransferEvent.DAMAGED, sender)
    trouble = {h.worker_id: h.trouble for h in chain.broadcast.view().holders}
    assert not any(trouble[name] for name in ("w1", "w2", "w3"))


def test_the_trainer_is_unreachable_for_one_worker(chain: Job) -> None:
    chain.say("w1", TransferEvent.FAILED, "trainer")
    assert chain.parents("w1", "w2", "w3", "w4", "w5") == "w5 trainer w2 w3 w4"


def test_gateways_are_chained_and_replaced_within_their_site(job: Job) -> None:
    job.join("a1", "a2", "a3", site="a")
    job.join("b1", "b2", "b3", site="b")
    job.announce(1)
    assert job.parents("a1", "b2", "b3") == "trainer b1 b2"
    assert job.parent("b1").startswith("a")
    job.broadcast.leave("b1")
    assert job.parent("b2").startswith("a")
    assert job.parent("b3") == "b2"


def test_partial_seeds_are_pulled_in_parallel(job: Job) -> None:
    job.join("w1", "w2")
    job.announce(1)
    second = job.route("w2")
    assert job.route("w1").sources == (ChunkSource(SEED),)
    job.broadcast.seed(1, ChunkSource("http://rank1:1", 1, 3))
    expected = (
        ChunkSource(SEED, 0, 3),
        ChunkSource("http://rank1:1", 1, 3),
        ChunkSource(SEED, 2, 3),
    )
    assert job.route("w1").sources == expected
    assert job.route("w2") is second
    job.say("w1", TransferEvent.FAILED, "rank1")
    assert job.parents("w1", "w2") == "w2 trainer"
    assert job.route("w2").sources == expected, "one has said so"
    job.say("w2", TransferEvent.FAILED, "rank1")
    assert job.parents("w1", "w2") == "w2 trainer"
    assert job.route("w2").sources == (ChunkSource(SEED),)
    with pytest.raises(NotFoundError):
        job.broadcast.seed(9, ChunkSource(SEED))


def test_an_unreachable_partial_seed_is_replaced_by_the_full_one(job: Job) -> None:
    job.join("w1")
    job.announce(1)
    job.broadcast.seed(1, ChunkSource("http://rank1:1", 1, 2))
    both = (ChunkSource(SEED, 0, 2), ChunkSource("http://rank1:1", 1, 2))
    assert job.route("w1").sources == both
    job.say("w1", TransferEvent.FAILED, "rank1")
    assert job.route("w1").sources == (ChunkSource(SEED),)
    job.now += 40
    assert job.route("w1").sources == both


def test_evaluation_holds_some_workers_back(chain: Job) -> None:
    for i in range(1, 6):
        chain.got(f"w{i}", 100)
    chain.broadcast.target("w2", 1)
    before = chain.route("w2")
    chain.announce(2)
    assert chain.route("w2") is before
    assert chain.route("w3").version.version == 2
    chain.broadcast.target("w2", None)
    assert chain.route("w2").version.version == 2


def test_a_worker_that_holds_the_version_keeps_its_position(chain: Job) -> None:
    again = Job()
    for i in (5, 3, 1, 2, 4):
        node = Node(f"w{i}", f"http://w{i}:1", "a")
        held = [TransferProgress(1, 100 if i < 3 else 20, 100)]
        again.broadcast.join(node, held)
    again.announce(1)
    assert again.parents("w1", "w2", "w3", "w4", "w5") == "trainer w1 w2 w3 w4"


def test_deltas_are_requested_from_holders_of_the_base(chain: Job) -> None:
    job = Job()
    job.broadcast = Broadcast(clock=lambda: job.now)
    job.join("w1", "w2", "w3")
    job.announce(1)
    for name in ("w1", "w2"):
        job.got(name, 100)
    job.announce(2)
    assert [job.route(name).base_version for name in ("w1", "w2", "w3")] == [1, 1, -1]


def test_deltas_are_used_over_slow_links_only(job: Job) -> None:
    job.join("a1", "a2", site="a")
    job.join("b1", "b2", site="b")
    job.announce(1)
    slow, fast = 10**7, 10**9
    for name in ("a1", "a2", "b1", "b2"):
        parent = job.parent(name)
        rate = slow if name[0] != parent[0] and parent != "trainer" else fast
        endpoint = SEED if parent == "trainer" else f"http://{parent}:1"
        report = TransferReport(
            name,
            1,
            endpoint,
            TransferEvent.DONE,
            wire_bytes=rate,
            busy_s=1.0,
            num_ready=100,
            num_chunks=100,
        )
        job.broadcast.report(report)
    job.announce(2)
    gateway = next(b for b in ("b1", "b2") if job.parent(b)[0] == "a")
    bases = {name: job.route(name).base_version for name in ("a1", "a2", "b1", "b2")}
    assert bases == {"a1": -1, "a2": -1, "b1": -1, "b2": -1} | {gateway: 1}


def test_old_versions_are_forgotten(chain: Job) -> None:
    for version in range(2, 9):
        chain.announce(version)
    assert chain.broadcast.versions == (7, 8)
    assert chain.broadcast.newest == 8


def test_a_worker_at_another_endpoint_is_a_new_one(chain: Job) -> None:
    chain.broadcast.join(Node("w2", "http://w2b:1", "a"))
    assert chain.parents("w1", "w3", "w2") == "trainer w1 w5"
    assert chain.broadcast.route("w2") is not None


def test_a_lagging_worker_is_not_a_fallback(job: Job) -> None:
    job.join("a1", site="a")
    job.join("b1", "b2", "b3", site="b")
    job.join("c1", site="c")
    job.announce(1)
    assert job.parents("a1", "b1", "b2", "b3") == "trainer a1 b1 b2"
    job.broadcast.leave("c1")
    job.got("b1", 50)
    job.join("c1", site="c")
    assert job.parent("c1") == "b1"
    job.got("b3", 100)
    job.say("b2", TransferEvent.STALLED, "b1")
    assert job.parents("b2", "b3") == "a1 b2"


def beat(job: Job, name: str, ready: int, sender: str) -> bool:
    held = TransferProgress(1, ready, 1024, (f"http://{sender}:1",))
    return job.broadcast.progress(name, [held])


def test_a_lagging_worker_is_rerouted_and_its_reports_ignored_until_it_moves(job: Job) -> None:
    job.join("a", "b", "c", "d")
    job.announce(1)
    assert job.parents("a", "b", "c", "d") == "trainer a b c"
    changed: list[str] = []
    for i in range(1, 9):
        job.now += 1
        beat(job, "a", 100 * i, "trainer")
        for name, ready, sender in (("b", 5, "a"), ("c", 4, "b"), ("d", 3, "c")):
            if beat(job, name, ready * i, sender):
                changed.append(name)
    assert changed == ["b"]
    assert job.parents("a", "c") == "trainer a"
    trouble = {h.worker_id: h.trouble for h in job.broadcast.view().holders}
    assert (trouble["a"], trouble["b"]) == ("", TransferEvent.SLOW)


def test_a_worker_still_lagging_after_a_move_reports_its_new_sender(job: Job) -> None:
    job.join("a", "b", "c", "d")
    job.announce(1)
    for i in range(1, 9):
        job.now += 1
        beat(job, "a", 100 * i, "trainer")
        beat(job, "b", 5 * i, "a")
        beat(job, "c", 4 * i, "b" if i < 5 else "a")
    assert job.parent("a") != "trainer"


def test_reports_on_versions_other_than_the_target_are_ignored(chain: Job) -> None:
    before = [chain.route(f"w{i}") for i in range(1, 6)]
    chain.announce(2)
    after = [chain.route(f"w{i}") for i in range(1, 6)]
    assert all(a is not b for a, b in zip(after, before, strict=True))
    for event in (TransferEvent.FAILED, TransferEvent.STALLED, TransferEvent.SLOW):
        assert not chain.say("w3", event, "w2", version=1)
    assert [chain.route(f"w{i}") for i in range(1, 6)] == after
    assert not any(h.trouble for h in chain.broadcast.view().holders)
    assert chain.say("w3", TransferEvent.DAMAGED, "w2", version=1)
    assert {h.worker_id: h.trouble for h in chain.broadcast.view().holders}[
        "w2"
    ] == TransferEvent.DAMAGED


def test_strangers_change_nothing(chain: Job) -> None:
    assert not chain.say("stranger", TransferEvent.DAMAGED, "w2")
    assert not chain.broadcast.progress("stranger", [TransferProgress(1, 1, 100)])
    assert not any(h.trouble for h in chain.broadcast.view().holders)
