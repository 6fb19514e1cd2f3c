import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import JobSpec
from paceline.enums import Purpose
from paceline.platform import wire
from paceline.platform.progress import EvalOutcome, LedgerProgress
from paceline.types import Job
from paceline_experience.jobs.history import History, JobMetricRow, summarise
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.ledger.records import row_text
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store


@pytest.fixture
async def job(store: Store) -> Job:
    fields: dict[str, Any] = {
        "name": "sums",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": [{"kind": "exact"}],
    }
    return await JobStore(store).create(JobParts(JobSpec.model_validate(fields)), artifacts={})


async def add(store: Store, job: Job, *, step: int, kind: str, values: dict[str, Any]) -> None:
    """As the ledger's scripts do."""
    key = JobKeys(job.status.tenant, job.status.job_id).metrics
    await store.command("RPUSH", key, row_text(step=step, kind=kind, values=values))


def lines(history: History, job: Job) -> list[dict[str, Any]]:
    path = history.folder(job.status.job_id) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_rows_are_in_the_store_and_in_the_file(
    store: Store, job: Job, tmp_path: Path
) -> None:
    history = History(store, tmp_path)
    await history.follow(job)
    changed = history.changed(job.status.job_id).event()
    await add(store, job, step=1, kind="train", values={"loss": 0.5})
    await add(store, job, step=1, kind="eval", values={"reward": 0.25})
    assert [row.index for row in await history.follow(job)] == [0, 1]
    assert await history.follow(job) == []
    assert changed.is_set()
    rows = await history.rows(job, after=0, limit=10)
    assert [(r.index, r.step, r.kind) for r in rows] == [(0, 1, "train"), (1, 1, "eval")]
    assert lines(history, job) == [
        {"index": 0, "step": 1, "kind": "train", "loss": 0.5},
        {"index": 1, "step": 1, "kind": "eval", "reward": 0.25},
    ]


async def test_a_row_of_an_earlier_release_with_half_a_surrogate_pair_is_served(
    store: Store, job: Job, tmp_path: Path
) -> None:
    key = JobKeys(job.status.tenant, job.status.job_id).metrics
    row = {"step": 1, "kind": "train", "values": {"\ud800": 1.0, "emoji \U0001f600": 2.0}}
    await store.command("RPUSH", key, json.dumps(row))
    (served,) = await History(store, tmp_path).page(job, after=0, limit=10, max_bytes=1000)
    assert served.values == {"?": 1.0, "emoji \U0001f600": 2.0}
    assert wire.from_struct(wire.to_struct(served.values)) == {"?": 1, "emoji \U0001f600": 2}


async def test_rows_come_in_pages(store: Store, job: Job, tmp_path: Path) -> None:
    history = History(store, tmp_path)
    await history.follow(job)
    for step in range(5):
        await add(store, job, step=step, kind="train", values={})
    assert [r.step for r in await history.rows(job, after=1, limit=2)] == [1, 2]
    assert [r.step for r in await history.rows(job, after=3, limit=-1)] == [3, 4]
    assert await history.rows(job, after=5, limit=2) == []


async def test_a_torn_file_is_mended_from_the_store(store: Store, job: Job, tmp_path: Path) -> None:
    history = History(store, tmp_path)
    await history.follow(job)
    for step in range(3):
        await add(store, job, step=step, kind="train", values={"x": step})
    await history.follow(job)
    whole = lines(history, job)
    path = history.folder(job.status.job_id) / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    await History(store, tmp_path).follow(job)
    assert lines(history, job) == whole


class SlowHistory(History):
    """Its first read of rows returns when it may."""

    def __init__(self, store: Store, folder: Path) -> None:
        super().__init__(store, folder)
        self.has_read, self.goes_on = asyncio.Event(), asyncio.Event()

    async def rows(self, job: Job, *, after: int, limit: int) -> list[JobMetricRow]:
        rows = await super().rows(job, after=after, limit=limit)
        if not self.has_read.is_set():
            self.has_read.set()
            await self.goes_on.wait()
        return rows


async def test_a_file_is_written_by_one_at_a_time(store: Store, job: Job, tmp_path: Path) -> None:
    history = SlowHistory(store, tmp_path)
    for step in range(3):
        await add(store, job, step=step, kind="train", values={})
    first = asyncio.create_task(history.follow(job))
    await history.has_read.wait()
    history.forget(job.status.job_id)
    await add(store, job, step=3, kind="train", values={})
    second = asyncio.create_task(history.follow(job, rewrite=True))
    await asyncio.wait({second}, timeout=0.1)
    history.goes_on.set()
    await asyncio.gather(first, second)
    assert [line["step"] for line in lines(history, job)] == [0, 1, 2, 3]


def test_a_summary_has_what_the_ledger_counted(job: Job, tmp_path: Path, store: Store) -> None:
    live = LedgerProgress(
        counts={"trained": 8, "durable": 16},
        dropped={"filtered": 4},
        staleness_histogram={"0": 20, "3": 4, "5": 0},
        tokens_generated=90,
        eval_tokens=10,
        eval_reward_start=0.1,
        eval_reward=0.9,
        eval_step=3,
        eval_last=EvalOutcome(version=3, step=3, reward=0.9, measured=9, of=10, complete=True),
        step=3,
        version=3,
    )
    steps = [
        {"versions_sampled": 1, "versions_checked": 1, "mismatch_tokens": 30}
        | {"mismatch_kl": 2e-7, "logprob_diff_max": 1e-6},
        {"versions_sampled": 2, "versions_checked": 1, "mismatch_tokens": 10}
        | {"mismatch_kl": 6e-7, "logprob_diff_max": 3e-6},
        {"versions_sampled": 0, "versions_checked": 0},
        {"eval_reward": 0.5},
    ]
    rows = [JobMetricRow(i, i, Purpose.TRAIN, values) for i, values in enumerate(steps)]
    summary = summarise(job, live, rows, state="succeeded", ledger_consistent=True)
    assert summary["mismatch_kl"] == pytest.approx(3e-7)
    assert (summary["mismatch_tokens"], summary["logprob_diff_max"]) == (40, 3e-6)
    assert (summary["versions_sampled"], summary["versions_checked"]) == (3, 2)
    history = History(store, tmp_path)
    history.write_summary(job, summary)
    path = history.folder(job.status.job_id) / "summary.json"
    assert json.loads(path.read_text()) == summary
    assert summary["episodes_trained"] == 24
    assert summary["episodes_dropped"] == {"filtered": 4}
    assert summary["staleness_max"] == 3
    assert summary["tokens_generated"] == 100
    assert (summary["eval_reward_start"], summary["eval_reward_end"]) == (0.1, 0.9)
    assert (summary["eval_step_end"], summary["eval_last"]["of"]) == (3, 10)
    assert (summary["steps"], summary["versions"], summary["ledger_consistent"]) == (3, 4, True)
