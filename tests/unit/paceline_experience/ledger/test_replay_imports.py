"""Trajectories that were collected elsewhere are guests of later groups, each line checked."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from pydantic_core import to_json

from paceline.errors import DeadlineError, InvalidError, StateError, UnavailableError
from paceline.testing import environments
from paceline.types import Task
from paceline.v1 import experience_pb2 as pb
from paceline_experience.jobs.own_tasks import StoredTasks
from paceline_experience.ledger.replay.imports import lines_of
from paceline_experience.ledger.replay.lookup import MAX_SCANNED, TaskLookup
from paceline_experience.store.keys import JobKeys
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from paceline_experience.ledger.ledger import JobLedger
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

DART: dict[str, Any] = {
    "batch_groups": 1,
    "group_size": 4,
    "max_staleness": 0,
    "replay": {"kind": "dart_pool", "per_task": 2},
}
VOCABULARY = 100


def row(**changes: Any) -> dict[str, Any]:
    """The least that a line needs; two policy tokens after two of the prompt."""
    spans = [
        {"start": 0, "end": 2, "source": "template"},
        {"start": 2, "end": 4, "source": "policy"},
    ]
    transcript = {"tokens": [7, 8, 9, 10], "spans": spans, "logprobs": [-0.25, -0.75]}
    transcript |= changes.pop("transcript", {})
    return {"task_id": "t0", "transcripts": [transcript], "score": {"reward": 1.0}} | changes


async def failed(world: World, ledger: JobLedger, *, version: int = 0) -> str:
    """Play a group without a success; returns its name."""
    (leased,) = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    done = [world.made(leased, n, reward=0.0, version=version) for n in range(4)]
    await ledger.submit(done)
    return leased.group_id


async def test_an_imported_success_joins_a_group_of_failures(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience=DART, num_tasks=1)
    ledger = await world.started()
    lines = [json.dumps(row(sampling={"temperature": 0.5}, extra=1))] * 2
    report = await ledger.imports.add(lines, vocabulary=VOCABULARY)
    assert (report.num_stored, report.num_refused) == (2, 0)
    assert await store.command("HLEN", JobKeys("default", "j1").replay) == 1  # the same line
    ledger = await world.opened()
    await failed(world, ledger)
    share = await ledger.take(incarnation=1, step=0, rank=0, world=1)
    found = {s.index: s for s in map(pb.TrainSample.FromString, share.samples)}
    assert found.keys() == {1, 2, 3, 4}
    guest = found[4]
    assert (guest.reward, guest.temperature) == (1.0, 0.5)
    assert list(guest.tokens) == [7, 8, 9, 10]
    assert list(guest.logprobs) == [-0.25, -0.75]
    assert [(run.version, run.count) for run in guest.versions] == [(-1, 2)]
    assert (share.stats.replayed, share.stats.staleness_max) == (1, 0)
    await ledger.commit(incarnation=1, step=0, batch_id=share.batch_id, metrics={})
    counts = await world.clean(ledger)
    assert (counts["admitted"], counts["replayed"]) == (4, 1)


async def test_exports_of_another_job_can_be_imported(store: Store, worlds: Worlds) -> None:
    other = worlds(store, experience={**DART, "keep_trajectories": 8}, num_tasks=1)
    other.job_id = "other"
    ledger = await other.started()
    (leased,) = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    await ledger.submit([other.made(leased, n, reward=float(n == 1)) for n in range(4)])
    await other.trained(ledger, 0)
    exported, _ = await ledger.trajectories.page(purpose="train", page_size=9, page_token="")
    world = worlds(store, experience=DART, num_tasks=1)
    ledger = await world.started()
    lines = [to_json(each).decode() for each in exported]
    assert len(lines) == 4
    report = await ledger.imports.add(lines, vocabulary=VOCABULARY)
    assert (report.num_stored, report.num_refused) == (2, 0)  # of a task at most two are kept
    await world.clean(ledger)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is no JSON"),
        ("[" * 5000, "is nested too deeply"),
        (json.dumps({"messages": [], "task_id": "t0"}), "messages have no tokens and no log-probs"),
        (json.dumps(row(task_id="t9")), "'t9' is no task of the job"),
        (json.dumps(row(score={"reward": float("nan")})), "score.reward: nan is not finite"),
        (json.dumps(row(transcripts=[])), "transcripts: List should have at least 1 item"),
        (json.dumps(row(transcript={"logprobs": []})), "logprobs: 0 of 2 policy tokens; without"),
        (json.dumps(row(transcript={"logprobs": [0.5, -1]})), "logprobs: one is not finite, or ab"),
        (json.dumps(row(transcript={"tokens": [7, 8, 9, 100]})), "a token is not in 0 to 99"),
        (json.dumps(row(transcript={"tokens": [1] * 5})), "do not cover the 5 tokens without gaps"),
        (json.dumps(row(transcript={"tokens": [1] * 3000})), "3000 tokens; sampling.max_context"),
        (json.dumps(row(transcript={"branch_token": 1})), "it continues a sibling"),
        (
            json.dumps(row(transcript={"spans": [{"start": 0, "end": 4, "source": "expert"}]})),
            "none has the source `policy`",
        ),
    ],
)
async def test_a_line_that_cannot_be_trained_is_refused_alone(
    store: Store, worlds: Worlds, line: str, says: str
) -> None:
    world = worlds(store, experience=DART, num_tasks=1)
    ledger = await world.started()
    report = await ledger.imports.add([json.dumps(row()), line], vocabulary=VOCABULARY)
    assert (report.num_stored, report.num_refused) == (1, 1)
    assert says in report.problems[0]
    assert report.problems[0].startswith("line 2: ")
    await world.clean(ledger)


class Endless:
    """As many numbers as a source may have; tells where one is, but for `unlucky` ones."""

    def __init__(self) -> None:
        self.num_made = 0

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, position: int, /) -> Task:
        self.num_made += 1
        return Task(f"t{position}", "arithmetic", "{}")

    def position_of(self, task_id: str, /) -> int | None:
        return int(task_id[1:]) if task_id != "unlucky" else None


class Gated:
    """Three tasks, of which one cannot be made, in a source that waits for a gate."""

    def __init__(self) -> None:
        self.gate, self.num_made = threading.Event(), 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, position: int, /) -> Task:
        assert self.gate.wait(PATIENCE_S)
        self.num_made += 1
        if position == 1:
            raise OSError("gone")
        return Task(f"t{position}", "arithmetic", "{}")


async def test_only_tasks_of_the_lines_are_asked_for(store: Store, worlds: Worlds) -> None:
    tasks = Endless()
    world = worlds(store, experience=DART)
    world.tasks = tasks
    ledger = await world.started()
    asked = [f"t{1 << 39}", "unlucky", "wrong", f"t{1 << 40}", "t-1"]
    lines = [json.dumps(row(task_id=each)) for each in asked]
    report = await ledger.imports.add(lines, vocabulary=VOCABULARY)
    assert (report.num_stored, report.num_refused) == (1, 4)
    assert tasks.num_made == 1
    too_many = worlds(store, experience=DART, num_tasks=MAX_SCANNED + 1)
    too_many.job_id = "j2"
    ledger = await too_many.started()
    with pytest.raises(InvalidError, match="1000001 tasks: at most 1000000 are looked through"):
        await ledger.imports.add(lines, vocabulary=VOCABULARY)


async def test_tasks_are_looked_through_once_and_faulty_ones_left_out() -> None:
    tasks = Gated()
    lookup = TaskLookup(tasks, job_id="j1", wait_s=0.0)
    ended = TaskLookup(tasks, job_id="j2", wait_s=0.0)
    for each in (lookup, lookup, ended):
        with pytest.raises(DeadlineError, match=r"looked through \(0 of 3\); import again"):
            await each.positions(["t2"])
    ended.close()
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="closed meanwhile"):
        await ended.positions(["t2"])
    tasks.gate.set()
    for _ in range(2):
        assert await found_by(lookup, "t2", "t1", "t7") == {"t2": 2}
    assert tasks.num_made == 3 + 3 + 2  # the last slice of each, and what was asked for


async def found_by(lookup: TaskLookup, *task_ids: str) -> dict[str, int]:
    while True:
        with suppress(DeadlineError):
            return await lookup.positions(task_ids)
        await asyncio.sleep(0.01)


def test_only_line_ends_separate_lines() -> None:
    texts = ['{"a": "\u2028\u2029\x85"}', "{}"]
    assert lines_of(f"{texts[0]}\n \n{texts[1]}\n") == texts


def test_stored_tasks_know_their_places() -> None:
    rows = [[f"t{place}", "arithmetic", "{}", 0, ""] for place in range(3)]

    def make(**options: int) -> StoredTasks:
        assert options == {"seed": 7}
        return StoredTasks(rows)

    environments.tasks_keep_their_order(make)
    assert StoredTasks(rows).position_of("t3") is None


async def test_own_successes_take_the_places_of_imported_ones(store: Store, worlds: Worlds) -> None:
    world = worlds(store, experience=DART, num_tasks=1)
    ledger = await world.started()
    lines = [json.dumps(row(score={"reward": 1.0 + n})) for n in range(2)]
    await ledger.imports.add(lines, vocabulary=VOCABULARY)
    (leased,) = await ledger.leases.lease(worker_id="w", train=4, evals=0)
    await ledger.submit([world.made(leased, n, reward=float(n < 2)) for n in range(4)])
    await world.trained(ledger, 0)
    kept = await store.command("HKEYS", JobKeys("default", "j1").replay)
    assert sorted(kept) == [b"0/0", b"0/1"]
    assert not any("imported" in name for name in await world.payloads())
    await world.clean(ledger)


async def test_jobs_without_replay_or_that_are_over_take_nothing(
    store: Store, worlds: Worlds
) -> None:
    ledger = await worlds(store).started()
    with pytest.raises(InvalidError, match="the job has none"):
        await ledger.imports.add([json.dumps(row())], vocabulary=VOCABULARY)
    await store.redis.flushall()
    world = worlds(store, experience=DART, num_tasks=1)
    ledger = await world.started()
    with pytest.raises(InvalidError, match="1025; at most 1024"):
        await ledger.imports.add(["{}"] * 1025, vocabulary=VOCABULARY)
    await ledger.completion.cancel()
    with pytest.raises(StateError, match="about to end"):
        await ledger.imports.add([json.dumps(row())], vocabulary=VOCABULARY)
    assert not await world.payloads()
