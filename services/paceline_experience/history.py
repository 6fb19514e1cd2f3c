"""Metric rows of jobs in the store and as files, and the summary at the end."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from paceline.files import write_json
from paceline.logs import Log
from paceline.types import Job
from paceline_experience.core import Signal
from paceline_experience.store import Store, job_key

_AT_ONCE = 64
log = Log("history")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a job's history; `index` counts from 0."""

    index: int
    step: int
    kind: str  # train | eval
    values: dict[str, Any]


class History:
    """What jobs have reported. `changed` fires for each new row and each change of state."""

    def __init__(self, store: Store, run_dir: Path) -> None:
        self._store = store
        self._run_dir = run_dir
        self._changed: defaultdict[str, Signal] = defaultdict(Signal)
        self._written: dict[str, int] = {}  # rows of each file; missing: it is written anew
        # A lock lives while it is used.
        self._writing = WeakValueDictionary[str, asyncio.Lock]()

    def changed(self, job_id: str) -> Signal:
        """Wakes whoever watches the job."""
        return self._changed[job_id]

    def folder(self, job_id: str) -> Path:
        """Where the files of a job are."""
        return self._run_dir / "jobs" / job_id

    async def follow(self, job: Job, *, anew: bool = False) -> list[Row]:
        """Add to `metrics.jsonl` what the ledger has put into the store since; these rows.

        The file is written anew the first time, for a crash may have come between the two, and
        after an error, which costs the job nothing.
        """
        job_id = job.status.job_id
        async with self._writing.setdefault(job_id, asyncio.Lock()):
            known = 0 if anew else self._written.get(job_id, 0)
            rows = await self.rows(job, after=known, limit=-1)
            try:
                self._append(job, rows, anew=known == 0)
                self._written[job_id] = known + len(rows)
            except OSError as error:
                self._written.pop(job_id, None)
                log.warning("metrics.jsonl not written", job=job_id, error=error)
        if rows:
            self._changed[job_id].fire()
        return rows

    def forget(self, job_id: str) -> None:
        """The job is over, or another replica's."""
        self._written.pop(job_id, None)

    def _append(self, job: Job, rows: Sequence[Row], *, anew: bool) -> None:
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if anew else "a") as file:
            file.writelines(map(_line, rows))

    async def count(self, job: Job) -> int:
        """How many rows there are."""
        return await self._store.command("LLEN", self._key(job))

    async def page(self, job: Job, *, after: int, limit: int, max_bytes: int) -> list[Row]:
        """As `rows`, but no more after the row that makes it larger than `max_bytes`."""
        found: list[Row] = []
        num_bytes = 0
        while len(found) < limit and num_bytes < max_bytes:
            size = min(_AT_ONCE, limit - len(found))
            some = await self.rows(job, after=after + len(found), limit=size)
            for row in some:
                found.append(row)
                num_bytes += len(_line(row))
                if num_bytes >= max_bytes:
                    break
            if len(some) < size:
                break
        return found

    async def rows(self, job: Job, *, after: int, limit: int) -> list[Row]:
        """At most `limit` rows (negative: all) from index `after` on."""
        last = after + limit - 1 if limit >= 0 else -1
        found = await self._store.command("LRANGE", self._key(job), after, last)
        return [Row(after + i, **json.loads(text)) for i, text in enumerate(found)]

    def write_summary(self, job: Job, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        write_json(self.folder(job.status.job_id) / "summary.json", summary)

    def _path(self, job: Job) -> Path:
        return self.folder(job.status.job_id) / "metrics.jsonl"

    @staticmethod
    def _key(job: Job) -> str:
        return job_key(job.status.tenant, job.status.job_id, "metrics")


def row_text(*, step: int, kind: str, values: Mapping[str, Any]) -> str:
    """A row as the ledger's scripts put it into the store."""
    return json.dumps({"step": step, "kind": kind, "values": values})


def _line(row: Row) -> str:
    head = {"index": row.index, "step": row.step, "kind": row.kind}
    return json.dumps({**head, **row.values}) + "\n"


def agreement(rows: Sequence[Row]) -> dict[str, Any]:
    """How far engines and trainer were apart in all steps; see the trainer's `Mismatch`."""
    told = [row.values for row in rows if "versions_sampled" in row.values]
    checked = [values for values in told if values.get("mismatch_tokens")]
    tokens = sum(values["mismatch_tokens"] for values in checked)
    apart = sum(values["mismatch_kl"] * values["mismatch_tokens"] for values in checked)
    return {
        "mismatch_kl": apart / tokens if tokens else None,
        "mismatch_tokens": int(tokens),
        "logprob_diff_max": max((values["logprob_diff_max"] for values in checked), default=None),
        "versions_sampled": int(sum(values["versions_sampled"] for values in told)),
        "versions_checked": int(sum(values["versions_checked"] for values in told)),
    }


def summarise(
    job: Job, live: dict[str, Any], rows: Sequence[Row], *, state: str, audit_ok: bool
) -> dict[str, Any]:
    """The content of `summary.json`."""
    counts, status = live["counts"], job.status
    histogram = {age: n for age, n in live["staleness_histogram"].items() if n}
    return {
        "job_id": status.job_id,
        "name": status.name,
        "state": state,
        "eval_reward_start": live["eval_reward_start"],
        "eval_reward_end": live["eval_reward"],
        "eval_step_end": live["eval_step"],
        "eval_last": live["eval_last"],
        "steps": live["step"],
        "wall_s": round(status.running_s, 3),
        "episodes_trained": counts["trained"] + counts["durable"],
        "episodes_dropped": live["dropped"],
        "tokens_generated": live["tokens_generated"] + live["eval_tokens"],
        "staleness_max": max((int(age) for age in histogram), default=0),
        "staleness_histogram": histogram,
        **agreement(rows),
        "audit_ok": audit_ok,
        "versions": live["version"] + 1,
    }
