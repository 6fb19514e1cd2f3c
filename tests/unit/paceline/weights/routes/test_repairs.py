"""Invariants: every worker reaches a seed, and no route changes without a reason."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from paceline.types import PolicyVersion
from paceline.weights.route import (
    ChunkSource,
    Route,
    TransferEvent,
    TransferProgress,
    TransferReport,
)
from paceline_experience.fleet.routing.broadcast import Broadcast, Node

SEED = "http://trainer"
WORKERS = [f"w{i}" for i in range(12)]
NUM_CHUNKS = 40
complaints = st.sampled_from(["stalled", "failed", "slow", "damaged"])
workers = st.sampled_from(WORKERS)
seconds = st.sampled_from([0.0, 1.0, 40.0, 400.0])


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """A test's model of one job."""

    clock: Clock = field(default_factory=Clock)
    sites: dict[str, str] = field(default_factory=dict[str, str])
    accused: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


class Repairs(RuleBasedStateMachine):
    """Random events on one broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.broadcast = Broadcast(clock=self.world.clock)
        self.version = 0
        self.before: dict[str, Route] = {}

    def routes(self) -> dict[str, Route]:
        got = {name: self.broadcast.route(name) for name in self.world.sites}
        return {name: route for name, route in got.items() if route is not None}

    @initialize(places=st.lists(st.sampled_from("abc"), min_size=3, max_size=12))
    def begin(self, places: list[str]) -> None:
        for name, site in zip(WORKERS, places, strict=False):
            self.join(name, site)
        self.announce()

    @rule(name=workers, site=st.sampled_from("abc"))
    def join(self, name: str, site: str) -> None:
        if name not in self.world.sites:
            self.world.sites[name] = site
            before = self.routes()
            self.broadcast.join(Node(name, f"http://{name}", site))
            after = self.routes()
            assert all(after[other] is route for other, route in before.items())

    @rule(name=workers)
    def leave(self, name: str) -> None:
        if self.world.sites.pop(name, None) is not None:
            before = self.routes()
            self.broadcast.leave(name)
            for other, route in self.routes().items():
                used = {s.endpoint for s in before[other].sources} | set(before[other].fallbacks)
                assert f"http://{name}" in used or route is before[other]

    @rule()
    def announce(self) -> None:
        self.version += 1
        version = PolicyVersion(self.version, step=self.version, num_bytes=NUM_CHUNKS << 20)
        self.broadcast.announce(version, seeds=[ChunkSource(SEED)], site="a", chunk_bytes=1 << 20)

    @rule(part=st.integers(0, 2))
    def seed(self, part: int) -> None:
        if self.version:
            self.broadcast.seed(self.version, ChunkSource(f"{SEED}{part}", part, 3))

    @rule(name=workers, ready=st.integers(0, NUM_CHUNKS), back=st.integers(0, 1))
    def progress(self, name: str, ready: int, back: int) -> None:
        before, slow = self.routes(), self.slow()
        held = TransferProgress(max(0, self.version - back), ready, NUM_CHUNKS)
        self.broadcast.progress(name, [held])
        after = self.routes()
        assert self.slow() != slow or all(after[n] is route for n, route in before.items())

    def slow(self) -> set[str]:
        return {h.worker_id for h in self.broadcast.view().holders if "slow" in h.trouble}

    @precondition(lambda self: self.version > 0)
    @rule(name=workers, event=complaints, other=workers, fallback=st.booleans())
    def complain(self, name: str, event: str, other: str, fallback: bool) -> None:
        route = self.routes().get(name)
        if route is None:
            return
        sender = f"http://{other}" if fallback else route.sources[0].endpoint
        report = TransferReport(name, route.version.version, sender, TransferEvent(event))
        self.broadcast.report(report)
        if event not in ("moved", "slow"):
            accused = self.world.accused.setdefault(name, set())
            accused.add(sender)
            trouble = {h.endpoint: h.trouble for h in self.broadcast.view().holders}
            if len(accused) < 3 and sender in trouble and not sender.startswith(SEED):
                expected = "damaged" if event == "damaged" else "suspect"
                assert expected in trouble[sender]
                assert event != "damaged" or sender not in self.senders()

    def senders(self) -> set[str]:
        return {
            end
            for route in self.routes().values()
            for end in [*(s.endpoint for s in route.sources), *route.fallbacks]
        }

    @rule(name=workers, back=st.integers(0, 1), free=st.booleans())
    def target(self, name: str, back: int, free: bool) -> None:
        version = None if free or self.version <= back else self.version - back
        if version is None or version in self.broadcast.versions:
            self.broadcast.target(name, version)

    @rule(passed=seconds)
    def wait(self, passed: float) -> None:
        self.world.clock.now += passed

    @invariant()
    def everybody_reaches_a_seed(self) -> None:
        routes = self.routes()
        for name, route in routes.items():
            seen, at = set[str](), route
            while not at.sources[0].endpoint.startswith(SEED):
                sender = at.sources[0].endpoint.removeprefix("http://")
                assert sender in self.world.sites, "a sender that is gone"
                assert sender not in seen, "a loop"
                seen.add(sender)
                if sender not in routes or routes[sender].version != route.version:
                    break  # it fetches another version and serves this one
                at = routes[sender]
            assert name not in {f.removeprefix("http://") for f in route.fallbacks}
            assert route.sources[0].endpoint not in route.fallbacks

    @invariant()
    def fallbacks_are_not_behind(self) -> None:
        routes = self.routes()
        for name, route in routes.items():
            for end in route.fallbacks:
                at = end.removeprefix("http://")
                while at in routes and routes[at].version == route.version:
                    at = routes[at].sources[0].endpoint.removeprefix("http://")
                    assert at != name

    @invariant()
    def damaged_peers_are_no_sources(self) -> None:
        trouble = {h.endpoint: h.trouble for h in self.broadcast.view().holders}
        assert not any("damaged" in trouble.get(end, "") for end in self.senders())

    @invariant()
    def asked_again_routes_are_the_same(self) -> None:
        first, second = self.routes(), self.routes()
        assert all(second[name] is route for name, route in first.items())


Repairs.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
)
TestRepairs = Repairs.TestCase
