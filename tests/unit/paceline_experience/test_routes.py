import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.types import PolicyVersion, Worker, WorkerKind
from paceline_experience.roster import Roster
from paceline_experience.routes import Peer, Route, Tracker, plan, staying

SOURCE = "http://trainer"


def peer(number: int, *, active: int = 0, held: tuple[int, ...] = ()) -> Peer:
    return Peer(f"w{number:02}", f"http://w{number:02}", active, frozenset(held))


peers_strategy = st.lists(
    st.builds(
        peer, st.integers(0, 20), active=st.integers(-1, 3), held=st.tuples(st.integers(0, 3))
    ),
    unique_by=lambda p: p.worker_id,
    max_size=12,
)


def chain(routes: dict[str, Route]) -> dict[str, str]:
    return {name: route.parent for name, route in routes.items()}


def test_a_new_version_goes_down_a_chain_by_worker_id() -> None:
    peers = [peer(2), peer(1), peer(3)]
    routes = plan(PolicyVersion(5, 5), SOURCE, peers=peers, takers={"w01", "w02", "w03"})
    assert chain(routes) == {"w01": SOURCE, "w02": "http://w01", "w03": "http://w02"}
    assert routes["w01"].fallbacks == ()
    assert routes["w03"].fallbacks == (SOURCE,)


def test_a_late_joiner_is_served_by_peers_that_hold_the_version() -> None:
    peers = [peer(1), peer(2, held=(5,)), peer(3, held=(4, 5))]
    routes = plan(PolicyVersion(5, 5), SOURCE, peers=peers, takers={"w01"})
    assert routes["w01"] == Route(PolicyVersion(5, 5), "http://w03", ("http://w02", SOURCE))


@given(peers_strategy, st.integers(0, 3))
def test_every_taker_reaches_the_source_without_a_loop(peers: list[Peer], version: int) -> None:
    takers = {p.worker_id for p in peers}
    routes = plan(PolicyVersion(version, 0), SOURCE, peers=peers, takers=takers)
    assert set(routes) == takers
    by_endpoint = {p.endpoint: p.worker_id for p in peers}
    for name in takers:
        seen: set[str] = set()
        parent = routes[name].parent
        while parent != SOURCE:
            assert parent not in seen
            seen.add(parent)
            parent = routes[by_endpoint[parent]].parent


@given(peers_strategy, st.integers(0, 3))
def test_all_endpoints_of_a_route_can_serve(peers: list[Peer], version: int) -> None:
    takers = {p.worker_id for p in peers if p.active_version <= version}
    routes = plan(PolicyVersion(version, 0), SOURCE, peers=peers, takers=takers)
    able = {p.endpoint for p in peers if p.worker_id in takers or version in p.held} | {SOURCE}
    own = {p.worker_id: p.endpoint for p in peers}
    for name, route in routes.items():
        ends = [route.parent, *route.fallbacks]
        assert set(ends) <= able - {own[name]}
        assert len(ends) == len(set(ends))
        assert SOURCE in ends


@given(peers_strategy, st.integers(0, 3))
def test_a_quarter_stays_for_an_eval(peers: list[Peer], version: int) -> None:
    stays = staying(peers, version)
    behind = sorted(p.worker_id for p in peers if p.active_version <= version)
    assert sorted(stays) == behind[: max(1, len(peers) // 4)]


def rollout(number: int) -> Worker:
    return Worker(
        worker_id=f"w{number:02}",
        kind=WorkerKind.ROLLOUT,
        endpoint=f"h:{number}",
        job_id="j",
        weights_endpoint=f"http://w{number:02}",
    )


@pytest.fixture
def roster() -> Roster:
    return Roster(lease_s=6.0)


@pytest.fixture
def tracker(roster: Roster) -> Tracker:
    return Tracker(roster)


async def soon(routes: AsyncIterator[Route]) -> Route:
    return await asyncio.wait_for(anext(routes), 5.0)


async def test_a_watcher_waits_for_the_first_version_and_for_its_own_join(
    roster: Roster, tracker: Tracker
) -> None:
    waiting = asyncio.create_task(soon(tracker.watch("j", "w01")))
    await asyncio.sleep(0)
    tracker.announce("j", PolicyVersion(0, 0), source=SOURCE)
    await asyncio.sleep(0)
    assert not waiting.done()
    roster.join(rollout(1))
    assert (await waiting).parent == SOURCE


async def test_each_version_is_told_once(roster: Roster, tracker: Tracker) -> None:
    roster.join(rollout(1))
    tracker.announce("j", PolicyVersion(0, 0), source=SOURCE)
    routes = tracker.watch("j", "w01")
    assert (await soon(routes)).version.version == 0
    roster.beat("w01", active_version=0, held=[0])
    tracker.announce("j", PolicyVersion(1, 1), source=SOURCE)
    assert (await soon(routes)).version.version == 1


async def test_a_dead_parent_is_replaced(roster: Roster, tracker: Tracker) -> None:
    for number in (1, 2, 3):
        roster.join(rollout(number))
    tracker.announce("j", PolicyVersion(0, 0), source=SOURCE)
    routes = tracker.watch("j", "w03")
    assert (await soon(routes)).parent == "http://w02"
    roster.leave("w02")
    assert (await soon(routes)).parent == "http://w01"


async def test_a_restarted_trainer_is_found(roster: Roster, tracker: Tracker) -> None:
    roster.join(rollout(1))
    tracker.announce("j", PolicyVersion(0, 0), source=SOURCE)
    routes = tracker.watch("j", "w01")
    assert (await soon(routes)).parent == SOURCE
    tracker.announce("j", PolicyVersion(1, 0), source="http://other")
    assert (await soon(routes)).parent == "http://other"


async def test_an_eval_holds_a_quarter_of_the_workers(roster: Roster, tracker: Tracker) -> None:
    for number in range(4):
        roster.join(rollout(number))
    tracker.announce("j", PolicyVersion(0, 0), source=SOURCE, held=0)
    held = tracker.watch("j", "w00")
    assert (await soon(held)).version.version == 0
    tracker.announce("j", PolicyVersion(1, 1), source=SOURCE, held=0)
    route = tracker.route("j", "w01")
    assert route is not None
    assert (route.version.version, route.parent) == (1, SOURCE)
    stays = tracker.route("j", "w00")
    assert stays is not None
    assert stays.version.version == 0
    tracker.hold("j", -1)
    assert (await soon(held)).version.version == 1


async def test_nobody_is_held_at_a_version_that_is_gone(roster: Roster, tracker: Tracker) -> None:
    trainer = Worker(worker_id="t", kind=WorkerKind.TRAINER, endpoint="h:t", job_id="j")
    for worker in (rollout(1), trainer):
        roster.join(worker)
    for version in range(3):
        tracker.announce("j", PolicyVersion(version, version), source=SOURCE, held=1)
    roster.beat("t", active_version=2, held=[1, 2])
    staying = tracker.route("j", "w01")
    assert staying is not None
    assert staying.version.version == 1
    roster.beat("t", active_version=2, held=[2])
    free = tracker.route("j", "w01")
    assert free is not None
    assert free.version.version == 2


async def test_workers_of_other_jobs_are_no_peers(roster: Roster, tracker: Tracker) -> None:
    roster.join(replace(rollout(1), job_id="k"))
    roster.join(rollout(2))
    tracker.announce("j", PolicyVersion(0, 0), source=SOURCE)
    route = tracker.route("j", "w02")
    assert route is not None
    assert route.parent == SOURCE
    assert tracker.route("j", "w01") is None
    tracker.forget("j")
    assert tracker.route("j", "w02") is None
