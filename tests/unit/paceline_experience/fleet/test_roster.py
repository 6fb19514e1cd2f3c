import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from paceline.enums import Phase, WorkerKind
from paceline.errors import NotFoundError
from paceline.types import Worker, WorkerPhase
from paceline.weights.route import TransferProgress
from paceline_experience.fleet.roster import Query, Roster
from paceline_harness.patience import PATIENCE_S


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(name: str, *, kind: WorkerKind = WorkerKind.ROLLOUT, job: str = "") -> Worker:
    return Worker(worker_id=name, kind=kind, endpoint=f"h:{name}", job_id=job)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def roster(clock: Clock) -> Roster:
    return Roster(lease_s=6.0, clock=clock, refresh_s=0.02)


def has(*versions: int) -> list[TransferProgress]:
    return [TransferProgress(version, 4, 4) for version in versions]


def names(roster: Roster, **query: Any) -> list[str]:
    return [found.worker_id for found in roster.workers(Query(**query))]


async def soon(workers: AsyncIterator[list[Worker]]) -> list[Worker]:
    return await asyncio.wait_for(anext(workers), PATIENCE_S)


def test_a_job_sees_its_own_workers_and_the_shared_pools(roster: Roster) -> None:
    roster.join(worker("r1", job="a"))
    roster.join(worker("r2", job="b"))
    roster.join(worker("e1", kind=WorkerKind.ENVIRONMENT))
    roster.join(replace(worker("e2", kind=WorkerKind.ENVIRONMENT), site="far"))
    assert names(roster) == ["e1", "e2", "r1", "r2"]
    assert names(roster, job_id="a") == ["e1", "e2", "r1"]
    assert names(roster, job_id="a", kind="rollout") == ["r1"]
    assert names(roster, site="far") == ["e2"]


def test_a_worker_without_heartbeats_is_dropped(roster: Roster, clock: Clock) -> None:
    roster.join(worker("a"))
    roster.join(worker("b"))
    clock.now = 5.0
    roster.beat("a")
    clock.now = 7.0
    assert [gone.worker_id for gone in roster.expire()] == ["b"]
    assert names(roster) == ["a"]
    with pytest.raises(NotFoundError, match="worker 'b' is not in the roster; join again"):
        roster.beat("b")


def test_a_heartbeat_carries_version_load_and_held_weights(roster: Roster) -> None:
    roster.join(worker("a"))
    phase = WorkerPhase(Phase.LOADING_WEIGHTS, 4)
    roster.beat("a", active_version=3, load={"running": 2.0}, transfers=has(2, 3), phases=[phase])
    (member,) = roster.members(Query())
    assert (member.worker.active_version, member.worker.load) == (3, {"running": 2.0})
    assert member.held == {2, 3}
    assert member.worker.phases == (phase,)


def test_leaving_twice_is_leaving_once(roster: Roster) -> None:
    roster.join(worker("a"))
    roster.leave("a")
    roster.leave("a")
    assert names(roster) == []


def test_a_new_process_under_the_same_name_holds_nothing(roster: Roster) -> None:
    roster.join(replace(worker("a"), pid=1))
    roster.beat("a", active_version=1, transfers=has(1))
    roster.join(replace(worker("a"), pid=2))
    assert roster.members(Query())[0].held == frozenset()


def test_load_and_phases_alone_are_no_change(roster: Roster) -> None:
    roster.join(worker("a"))
    roster.beat("a", active_version=1)
    event = roster.changed.event()
    roster.beat(
        "a", active_version=1, load={"running": 9.0}, phases=[WorkerPhase(Phase.SERVING, 1)]
    )
    roster.join(replace(worker("a"), active_version=1))
    assert not event.is_set()
    roster.beat("a", active_version=2)
    assert event.is_set()


async def test_a_watcher_sees_every_change(roster: Roster) -> None:
    roster.join(worker("a", job="j"))
    async with aclosing(roster.watch(Query(job_id="j"))) as seen:  # pyright: ignore[reportArgumentType]
        assert [w.worker_id for w in await soon(seen)] == ["a"]
        roster.join(worker("b"))
        assert [w.worker_id for w in await soon(seen)] == ["a", "b"]
        roster.beat("a", load={"running": 1.0})
        assert (await soon(seen))[0].load == {"running": 1.0}
        roster.leave("a")
        assert [w.worker_id for w in await soon(seen)] == ["b"]


async def test_a_watcher_of_an_empty_roster_gets_an_empty_list(roster: Roster) -> None:
    assert await soon(roster.watch(Query())) == []


def test_a_suspended_roster_drops_no_workers(roster: Roster, clock: Clock) -> None:
    roster.join(worker("a"))
    assert roster.expire() == []
    clock.now = 60.0
    assert roster.expire() == []
    seconds = [60.5 + second for second in range(7)]
    found: list[Worker] = []
    for clock.now in seconds:
        found = roster.expire()
    assert [each.worker_id for each in found] == ["a"]
