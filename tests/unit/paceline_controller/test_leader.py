"""Never two at work, whatever clocks and networks do."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConflictError, NotFoundError, UnavailableError
from paceline_controller.cluster.leader import Candidate, Leader, LeaseRecord, LeaseTimes
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import FakeClock

TIMES = LeaseTimes(lease_s=15.0, renew_within_s=10.0, retry_s=2.0)


@dataclass
class Store:
    """One lease that is written by version, and may be out of reach."""

    record: LeaseRecord | None = None
    writes: int = 0
    reads: int = 0
    away: bool = False
    slow_s: float = 0.0

    def put(self, bid: LeaseRecord) -> LeaseRecord:
        if (self.record.version if self.record else "") != bid.version:
            raise ConflictError("somebody else was faster")
        self.writes += 1
        self.record = replace(bid, version=str(self.writes))
        return self.record

    async def read(self) -> LeaseRecord:
        self.reads += 1
        await self._reach()
        if self.record is None:
            raise NotFoundError("no lease")
        return self.record

    async def make(self, record: LeaseRecord) -> LeaseRecord:
        await self._reach()
        return self.put(record)

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        await self._reach()
        return self.put(record)

    async def _reach(self) -> None:
        await asyncio.sleep(self.slow_s)
        if self.away:
            raise UnavailableError("no route")


@dataclass
class Player:
    """A candidate with a clock of its own; `offset` and `rate` are against true time."""

    candidate: Candidate
    offset: float
    rate: float
    read: LeaseRecord | None = None
    bid: LeaseRecord | None = None
    sent_s: float = 0.0
    has_read: bool = field(default=False)

    def now(self, true_s: float) -> float:
        return self.offset + self.rate * true_s


def players() -> st.SearchStrategy[list[tuple[float, float]]]:
    # 15 / 10 leaves room for rates that differ by less than half.
    one = st.tuples(st.floats(-1e6, 1e6), st.floats(0.85, 1.2))
    return st.lists(one, min_size=2, max_size=3)


# Mostly whole attempts, now and then one whose parts are far from each other.
KINDS = [*["attempt"] * 4, "attempt, reply lost", "read", "decide", "arrive", "resign"]
pauses = st.one_of(st.just(0.0), st.floats(0.0, 6.0), st.sampled_from([8.0, 9.5, 11.0]))
steps = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(KINDS), pauses), max_size=40)


@settings(max_examples=400, deadline=None)
@given(players(), steps)
def test_never_two_act(
    made: list[tuple[float, float]], script: list[tuple[int, str, float]]
) -> None:
    store, true_s = Store(), 0.0
    all_ = [Player(Candidate(f"c{i}", TIMES), o, r) for i, (o, r) in enumerate(made)]
    for index, kind, pause in script:
        true_s += pause
        one = all_[index % len(all_)]
        for step in ("read", "decide", kind) if kind.startswith("attempt") else (kind,):
            play(one, store, step, true_s)
        acting = [each for each in all_ if each.candidate.acting(each.now(true_s))]
        assert len(acting) <= 1


def play(one: Player, store: Store, step: str, true_s: float) -> None:
    """One step of one candidate: it reads, decides, and its request arrives, each when it likes."""
    now = one.now(true_s)
    if step == "read":
        one.read, one.has_read, one.bid = store.record, True, None
    elif step == "decide" and one.has_read:
        one.bid, one.sent_s, one.has_read = one.candidate.bid(one.read, now), now, False
        if one.bid is None:
            one.candidate.lost()
    elif step == "resign" and one.candidate.acting(now) and store.record:
        one.candidate.lost()
        one.bid = None
        if store.record.holder:
            store.put(replace(store.record, holder=""))
    elif one.bid is not None:
        bid, one.bid = one.bid, None
        try:
            written = store.put(bid)
        except ConflictError:
            return
        if not step.endswith("lost"):
            one.candidate.won(written, sent_s=one.sent_s)


def test_a_candidate_takes_what_is_free_and_waits_for_what_is_not() -> None:
    first, second = Candidate("a", TIMES), Candidate("b", TIMES)
    taken = first.bid(None, 0.0)
    assert taken == LeaseRecord("a", "")
    first.won(LeaseRecord("a", "1"), sent_s=0.0)
    assert first.acting(9.9)
    assert not first.acting(10.0)
    held = LeaseRecord("a", "1")
    assert second.bid(held, 1000.0) is None
    assert second.bid(held, 1014.9) is None
    assert second.bid(LeaseRecord("a", "2"), 1014.9) is None  # renewed: from the start again
    assert second.bid(LeaseRecord("a", "2"), 1029.8) is None
    assert second.bid(LeaseRecord("a", "2"), 1029.9) == LeaseRecord("b", "2", transitions=1)
    assert second.bid(LeaseRecord("", "3"), 1030.0) == LeaseRecord("b", "3", transitions=1)


def test_times_that_do_not_protect_are_refused() -> None:
    with pytest.raises(ValueError, match="renew_within_s < lease_s"):
        Candidate("a", LeaseTimes(lease_s=10.0, renew_within_s=10.0, retry_s=2.0))


# Leases run out on a clock that the test turns; only the pauses between attempts are real.
FAST = LeaseTimes(lease_s=60.0, renew_within_s=40.0, retry_s=0.5)


@dataclass
class Work:
    """Notes who works at a time."""

    at_work: set[str] = field(default_factory=set[str])
    terms: list[str] = field(default_factory=list[str])

    def of(self, name: str) -> Callable[[], "asyncio.Future[None]"]:
        async def work() -> None:
            assert not self.at_work
            self.at_work.add(name)
            self.terms.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                self.at_work.discard(name)

        return lambda: asyncio.ensure_future(work())


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def start(store: Store, work: Work, name: str, clock: FakeClock) -> "asyncio.Task[None]":
    leader = Leader(store, identity=name, times=FAST, clock=clock)
    return asyncio.create_task(leader.run(work.of(name)))


async def test_a_leader_hands_over_when_it_ends() -> None:
    store, work, clock = Store(), Work(), FakeClock()
    first = start(store, work, "a", clock)
    await until(lambda: work.at_work == {"a"})
    second = start(store, work, "b", clock)
    seen = store.reads
    await until(lambda: store.reads >= seen + 5)
    assert work.terms == ["a"]
    first.cancel()
    await until(lambda: work.at_work == {"b"})  # no lease has run out: the clock stands
    second.cancel()
    await asyncio.wait({first, second})
    assert store.record
    assert not store.record.holder


async def test_a_leader_without_a_cluster_stops_before_its_lease_ends() -> None:
    store, work, clock = Store(), Work(), FakeClock()
    task = start(store, work, "a", clock)
    await until(lambda: work.at_work == {"a"})
    store.away = True
    clock.pass_s(FAST.renew_within_s)
    await until(lambda: not work.at_work)
    store.away = False
    clock.pass_s(FAST.lease_s)
    await until(lambda: work.at_work == {"a"})
    assert work.terms == ["a", "a"]
    task.cancel()
    await asyncio.wait({task})


async def test_a_server_that_hangs_is_no_excuse() -> None:
    store, work, clock = Store(), Work(), FakeClock()
    task = start(store, work, "a", clock)
    await until(lambda: work.at_work == {"a"})
    store.slow_s = 600.0
    clock.pass_s(FAST.renew_within_s)
    await until(lambda: not work.at_work)
    task.cancel()
    await asyncio.wait({task})


async def test_a_failing_leader_logs_it_and_releases_the_lease() -> None:
    async def fails() -> None:
        raise ValueError("broken")

    store = Store()
    leader = Leader(store, identity="a", times=FAST)
    with pytest.raises(ValueError, match="broken"):
        await leader.run(fails)
    assert store.record
    assert not store.record.holder
