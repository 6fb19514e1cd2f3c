"""Stored episodes are found by what they are, and some of each step outlive the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config.limits import LimitSettings
from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.front.api.episodes import ListedEpisode, NumberRange
from paceline_experience.jobs.export import Exporter
from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.ledger.stored.listing import EpisodeQuery
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store

if TYPE_CHECKING:
    from paceline_harness.ledgers.world import World, Worlds

KEYS = JobKeys("default", "j1")


async def listed(
    ledger: JobLedger, query: EpisodeQuery | None = None, *, page_size: int = 100
) -> list[ListedEpisode]:
    """All pages."""
    found: list[ListedEpisode] = []
    token = ""
    while True:
        page, token = await ledger.episodes.page(
            query or EpisodeQuery(), page_size=page_size, page_token=token
        )
        found += page
        if not token:
            return found


async def played(world: World, ledger: JobLedger, steps: int, *, first: int = 0, **of: Any) -> None:
    """Train so many steps; each group has the rewards 0 and 1."""
    for step in range(first, first + steps):
        leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
        await ledger.submit(
            [
                world.made(a, place, reward=float(index % 2), version=step, **of)
                for a in leased
                for place, index in enumerate(a.indices)
            ]
        )
        await world.trained(ledger, step)


def names(found: list[ListedEpisode]) -> list[str]:
    return [f"{each.group_id}/{each.index}" for each in found]


def advantages_of(found: list[ListedEpisode]) -> dict[str, float | None]:
    return {name: each.advantage for name, each in zip(names(found), found, strict=True)}


async def test_every_filter_shows_only_what_it_says(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    ledger = await world.started()
    await played(world, ledger, 3)
    every = await listed(ledger)
    assert len(every) == 12
    assert {each.step for each in every} == {1, 2, 3}
    assert [each.step for each in every] == sorted((e.step for e in every), reverse=True)
    # Of each group one is above its mean and one below.
    assert {(e.reward, e.advantage and e.advantage > 0) for e in every} == {(0, False), (1, True)}
    filters: dict[EpisodeQuery, Callable[[ListedEpisode], bool]] = {
        EpisodeQuery(reward=NumberRange.parse("<0.5", name="reward")): lambda e: e.reward < 0.5,
        EpisodeQuery(step=NumberRange.parse(">1,<=2", name="step")): lambda e: e.step == 2,
        EpisodeQuery(age=NumberRange.parse("0", name="age")): lambda e: e.age == 0,
        EpisodeQuery(group_id=every[0].group_id): lambda e: e.group_id == every[0].group_id,
        EpisodeQuery(task_id=every[0].task_id): lambda e: e.task_id == every[0].task_id,
    }
    for query, holds in filters.items():
        wanted = [each for each in every if holds(each)]
        assert 0 < len(wanted) < len(every)
        assert names(await listed(ledger, query, page_size=3)) == names(wanted)
    newest = (await listed(ledger, EpisodeQuery(trajectories=True)))[0].trajectory
    assert newest is not None
    assert newest.episode_id == names(every)[0]
    assert newest.transcripts[0].logprobs == pytest.approx((-0.5,) * 3)


async def test_what_failed_is_told_apart(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience={"batch_groups": 1})
    ledger = await world.started()
    bad = ScoreStatus.PARSE_ERROR
    (first, *_) = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    await ledger.submit(
        [world.made(first, 0, status=bad), world.made(first, 1, reward=1.0, truncated=True)]
    )
    await world.trained(ledger, 0)
    await played(world, ledger, 1, first=1)
    assert len(await listed(ledger)) == 4
    failed = await listed(ledger, EpisodeQuery(failed=True))
    assert {(e.truncated, e.status) for e in failed} == {(False, bad), (True, ScoreStatus.OK)}
    assert len(failed) == 2
    assert len(await listed(ledger, EpisodeQuery(status=bad))) == 1


async def test_pages_are_bounded_by_what_is_read_for_them(store: Store, worlds: Worlds) -> None:
    world = worlds(store)
    world.limits = LimitSettings(page_bytes=64 << 10)
    ledger = await world.started()
    await played(world, ledger, 2, tokens=3000)  # 27 KB each
    query = EpisodeQuery(reward=NumberRange.parse(">2", name="reward"))
    page, token = await ledger.episodes.page(query, page_size=100, page_token="")
    assert (page, bool(token)) == ([], True)
    assert await listed(ledger, query) == []
    assert len(await listed(ledger)) == 8


@pytest.mark.parametrize("token", ["x", "r:", "s:1.5/a", "r:1;DEL", "s:-1/a"])
async def test_a_token_of_nobody_is_refused(store: Store, worlds: Worlds, token: str) -> None:
    ledger = await worlds(store).started()
    with pytest.raises(InvalidError, match="was not given by this service"):
        await ledger.episodes.page(EpisodeQuery(), page_size=1, page_token=token)


async def test_some_of_each_step_outlive_the_others(
    store: Store, worlds: Worlds, tmp_path: Path
) -> None:
    kept = {"keep_trajectories": 1, "samples": {"trained": 1, "dropped": 0}}
    world = worlds(store, experience=kept)
    ledger = await world.started()
    await played(world, ledger, 4)
    advantages = advantages_of(await listed(ledger))
    await Exporter(tmp_path).export(ledger, name="step-4")
    await ledger.commit_checkpoint(incarnation=1, step=4, path="c")
    found = await listed(ledger)
    # The newest one of the last step, and one of each step.
    assert [each.step for each in found] == [4, 4, 3, 2, 1]
    assert advantages_of(found).items() <= advantages.items()
    assert names(await listed(ledger, page_size=1)) == names(found)
    assert names(await listed(await world.opened())) == names(found)
    stored = {name.rsplit("/", 1)[0] for name in await world.payloads()}
    assert stored & advantages.keys() == set(names(found))
    assert int(await store.command("HLEN", KEYS.notes)) == 5
    await world.clean(ledger)


async def test_a_sample_of_what_is_dropped_says_why(store: Store, worlds: Worlds) -> None:
    kept = {"samples": {"trained": 0, "dropped": 2}, "filters": [{"kind": "zero_variance"}]}
    world = worlds(store, experience=kept)
    ledger = await world.started()
    for _ in range(5):
        leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
        await ledger.submit([world.made(a, n) for a in leased for n in range(len(a.indices))])
    found = await listed(ledger, EpisodeQuery(dropped=True))
    assert [(each.dropped, each.step, each.advantage) for each in found] == [
        ("filtered", 1, None)
    ] * 2
    assert await listed(ledger) == []
    assert len(await world.payloads()) == 2
    await world.clean(ledger)


async def test_samples_are_bounded_in_number_and_bytes(store: Store, worlds: Worlds) -> None:
    few = {"trained": 0, "dropped": 100, "total": 3}
    world = worlds(store, experience={"samples": few, "filters": [{"kind": "zero_variance"}]})
    ledger = await world.started()
    for _ in range(4):
        leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
        await ledger.submit([world.made(a, n) for a in leased for n in range(len(a.indices))])
        assert len(await world.payloads()) <= 3
    size = (await ledger.live()).payload_bytes
    tight = {**few, "total": 100}
    world.spec = worlds(
        store,
        experience={
            "samples": tight,
            "filters": [{"kind": "zero_variance"}],
            "payload_bytes": size * 16 // 3 * 2,  # a sixteenth of which are two
        },
    ).spec
    ledger = await world.opened()
    leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
    await ledger.submit([world.made(a, n) for a in leased for n in range(len(a.indices))])
    assert 1 <= len(await world.payloads()) <= 2
    await world.clean(ledger)


@pytest.mark.parametrize("text", ["<", "x", "<<1", "1..2", "nan", ">1e999", ",".join(["<1"] * 9)])
def test_a_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="reward: "):
        NumberRange.parse(text, name="reward")
