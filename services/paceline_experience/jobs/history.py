"""Metric rows of jobs, in the store and as files, and the final summary."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from pydantic_core import to_jsonable_python

from paceline.enums import Purpose
from paceline.platform.files import write_json
from paceline.platform.progress import LedgerProgress
from paceline.platform.telemetry.logs import Log
from paceline.platform.text import encodable
from paceline.types import Job
from paceline_experience.store.keys import job_key
from paceline_experience.store.signal import Signal
from paceline_experience.store.store import Store

_FETCH_ROWS = 64
log = Log("history")


@dataclass(frozen=True, slots=True)
class JobMetricRow:
    """One row of a job's history; `index` counts from 0."""

    index: int
    step: int
    kind: Purpose
    values: dict[str, Any]


class History:
    """Metric rows by job. `changed` fires for each new row and each change of state."""

    def __init__(self, store: Store, run_dir: Path) -> None:
        self._store = store
        self._run_dir = run_dir
        self._changed: defaultdict[str, Signal] = defaultdict(Signal)
        self._written: dict[str, int] = {}  # rows in each file; missing: rewrite it
        # A lock lives while it is in use.
        self._writing = WeakValueDictionary[str, asyncio.Lock]()

    def changed(self, job_id: str) -> Signal:
        """The signal for watchers of a job."""
        return self._changed[job_id]

    def folder(self, job_id: str) -> Path:
        """The folder of a job's files."""
        return self._run_dir / "jobs" / job_id

    def make_folder(self, job_id: str) -> None:
        """Make the folder of a job before its trainer mounts it: else it is of who mounts it."""
        try:
            self.folder(job_id).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("folder not made", job=job_id, error=error)

    async def follow(self, job: Job, *, rewrite: bool = False) -> list[JobMetricRow]:
        """Append new rows of the store to `metrics.jsonl`; returns these rows.

        The file is rewritten the first time, since a crash may have separated it from the store,
        and after an error of the disk, which does not affect the job.
        """
        job_id = job.status.job_id
        async with self._writing.setdefault(job_id, asyncio.Lock()):
            known = 0 if rewrite else self._written.get(job_id, 0)
            rows = await self.rows(job, after=known, limit=-1)
            try:
                self._write(job, rows, rewrite=known == 0)
                self._written[job_id] = known + len(rows)
            except OSError as error:
                self._written.pop(job_id, None)
                log.warning("metrics.jsonl not written", job=job_id, error=error)
        if rows:
            self._changed[job_id].fire()
        return rows

    def forget(self, job_id: str) -> None:
        """The job is over, or another replica owns it."""
        self._written.pop(job_id, None)

    def discard(self, job_id: str) -> None:
        """The job is deleted; those who watch it are told."""
        self.forget(job_id)
        if job_id in self._changed:
            self._changed.pop(job_id).fire()

    def _write(self, job: Job, rows: Sequence[JobMetricRow], *, rewrite: bool) -> None:
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if rewrite else "a") as file:
            file.writelines(map(_line, rows))

    async def count(self, job: Job) -> int:
        """Number of rows of a job."""
        return await self._store.command("LLEN", self._key(job))

    async def page(self, job: Job, *, after: int, limit: int, max_bytes: int) -> list[JobMetricRow]:
        """As `rows`, but ends with the row that takes it over `max_bytes`."""
        found: list[JobMetricRow] = []
        num_bytes = 0
        while len(found) < limit and num_bytes < max_bytes:
            size = min(_FETCH_ROWS, limit - len(found))
            chunk = await self.rows(job, after=after + len(found), limit=size)
            for row in chunk:
                found.append(row)
                num_bytes += len(_line(row))
                if num_bytes >= max_bytes:
                    break
            if len(chunk) < size:
                break
        return found

    async def rows(self, job: Job, *, after: int, limit: int) -> list[JobMetricRow]:
        """At most `limit` rows (negative: all) from index `after` on."""
        last = after + limit - 1 if limit >= 0 else -1
        found = await self._store.command("LRANGE", self._key(job), after, last)
        return [JobMetricRow(after + i, **_parsed(text)) for i, text in enumerate(found)]

    def write_summary(self, job: Job, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        write_json(self.folder(job.status.job_id) / "summary.json", summary)

    def write_record(self, job: Job) -> None:
        """Write `job.json`, which is what `GET /v1/jobs/ID` answers: for those who read the files.

        An error of the disk does not affect the job.
        """
        content = {
            "status": to_jsonable_python(job.status),
            "spec": json.loads(job.spec),
            "artifacts": job.artifacts,
        }
        try:
            write_json(self.folder(job.status.job_id) / "job.json", content)
        except OSError as error:
            log.warning("job.json not written", job=job.status.job_id, error=error)

    def _path(self, job: Job) -> Path:
        return self.folder(job.status.job_id) / "metrics.jsonl"

    @staticmethod
    def _key(job: Job) -> str:
        return job_key(job.status.tenant, job.status.job_id, "metrics")


def _parsed(text: bytes) -> dict[str, Any]:
    """A stored row; one of an earlier release may have a text that no message can hold."""
    row: dict[str, Any] = json.loads(text)
    if b"\\ud" in text:
        row = json.loads(encodable(json.dumps(row, ensure_ascii=False)))
    return row


def _line(row: JobMetricRow) -> str:
    head = {"index": row.index, "step": row.step, "kind": row.kind}
    return json.dumps({**head, **row.values}) + "\n"


def agreement(rows: Sequence[JobMetricRow]) -> dict[str, Any]:
    """Mismatch of engines and trainer over all steps; see the trainer's `Mismatch`."""
    sampled = [row.values for row in rows if "versions_sampled" in row.values]
    checked = [values for values in sampled if values.get("mismatch_tokens")]
    tokens = sum(values["mismatch_tokens"] for values in checked)
    weighted_kl = sum(values["mismatch_kl"] * values["mismatch_tokens"] for values in checked)
    return {
        "mismatch_kl": weighted_kl / tokens if tokens else None,
        "mismatch_tokens": int(tokens),
        "logprob_diff_max": max((values["logprob_diff_max"] for values in checked), default=None),
        "versions_sampled": int(sum(values["versions_sampled"] for values in sampled)),
        "versions_checked": int(sum(values["versions_checked"] for values in sampled)),
    }


def summarise(
    job: Job,
    live: LedgerProgress,
    rows: Sequence[JobMetricRow],
    *,
    state: str,
    ledger_consistent: bool,
) -> dict[str, Any]:
    """The content of `summary.json`."""
    counts, status = live.counts, job.status
    histogram = {age: n for age, n in live.staleness_histogram.items() if n}
    return {
        "job_id": status.job_id,
        "name": status.name,
        "state": state,
        "eval_reward_start": live.eval_reward_start,
        "eval_reward_end": live.eval_reward,
        "eval_step_end": live.eval_step,
        "eval_last": asdict(live.eval_last) if live.eval_last else {},
        "evals": {each.name: asdict(each) for each in live.evals},
        "steps": live.step,
        "wall_s": round(status.runtime_s, 3),
        "episodes_trained": counts["trained"] + counts["durable"],
        "episodes_dropped": live.dropped,
        "tokens_generated": live.tokens_generated + live.eval_tokens,
        "staleness_max": max((int(age) for age in histogram), default=0),
        "staleness_histogram": histogram,
        **agreement(rows),
        "ledger_consistent": ledger_consistent,
        "versions": live.version + 1,
    }
