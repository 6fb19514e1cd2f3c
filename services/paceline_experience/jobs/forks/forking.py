"""Forks jobs: a new job gets a copy of another one's ledger and of one of its checkpoints.

To its trainer that is as if it had been restarted: it loads the checkpoint and rewinds the ledger
to it. So batches that were fixed since are trained again as they were, and what is drawn, learned
and stored continues from there. The new job begins as one that is paused, since nothing can be
leased before its first version. Its record is written last, which makes it known to everybody.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import JobSpec, job_of
from paceline.config.lifecycle.forks import FIXED, FIXED_WEIGHTS, ForkSpec, changed_fields
from paceline.config.precision import with_dtype
from paceline.enums import EpisodeState, Purpose
from paceline.errors import (
    ConfigError,
    IntegrityError,
    NotFoundError,
    StateError,
    UnavailableError,
)
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.platform.telemetry.logs import Log
from paceline.types import Job
from paceline_experience.jobs.forks.checkpoint_copies import CheckpointCopy
from paceline_experience.jobs.forks.payload_copies import PayloadCopier, Renaming
from paceline_experience.jobs.forks.plan import ForkPlan
from paceline_experience.jobs.job_files import JobFiles
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.ledger.checkpoints import best_step
from paceline_experience.ledger.records import (
    HELD,
    Exported,
    LedgerMeta,
    WatchRecord,
    field_texts,
)
from paceline_experience.ledger.state import DROPPED, parse_group, parse_results
from paceline_experience.store.keys import JobKeys, all_keys
from paceline_experience.store.letters import LETTERS
from paceline_experience.store.store import Store, pairs

_CHUNK = 256
_AT_A_TIME, _OF_TENANT = 2, 1  # checkpoints that are copied
_SNAPSHOTS = 10  # of a ledger whose payloads go while they are copied
log = Log("forking")
_OF_GROUPS = ("groups", "batches", "results", "advantages", "outcomes")
_TOTALS = {"tokens": "tokens_generated", "eval:tokens": "eval_tokens"} | {
    "trained_tokens": "trained_tokens"
}
_COPIED = ("counts", "groups", "batches", "versions", "results", "advantages", "memory")


@dataclass(frozen=True, slots=True)
class _Copy:
    """What is copied of a ledger besides its payloads, read at one moment."""

    hashes: dict[str, dict[bytes, bytes]]
    meta: LedgerMeta
    ring: list[tuple[bytes, float]]
    rows: list[bytes]


class Forking:
    """Resolves what a job is forked from, and copies it."""

    def __init__(
        self, *, store: Store, jobs: JobStore, files: JobFiles, compress_over_bytes: int
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._files = files
        self._compress_over = compress_over_bytes
        self._slots = FairQueue(_AT_A_TIME, most_of_tenant=_OF_TENANT)

    async def resolved(self, job: JobParts, existing: Job | None) -> JobParts:
        """The job with step and digest of the checkpoint; of a repeated request, the same ones.

        Raises:
            NotFoundError: the tenant has no such job.
            ConfigError: it has no such checkpoint, or the job differs in what may not change.
        """
        spec, fork = job.spec, job.spec.fork
        if fork is None:
            return job
        if existing is not None:
            before = job_of(existing).fork
            same = before is not None and before.job == fork.job
            return JobParts(spec.model_copy(update={"fork": before})) if same else job
        parent = await self._parent(job.parent_id, job.tenant)
        parent_spec = job_of(parent)
        fixed = FIXED if spec.trains else FIXED_WEIGHTS
        changed = changed_fields(
            json.loads(parent_spec.model_dump_json()),
            json.loads(with_dtype(spec, "float32").model_dump_json()),  # as `job_of` reads it
            fixed,
        )
        if changed:
            raise ConfigError(
                f"{changed[0]}: cannot differ from job {fork.job}, as the checkpoint or the "
                f"memory of the job depends on it; the same holds for: {', '.join(fixed)}"
            )
        step, digest = await self._checkpoint(parent, parent_spec, fork)
        fixed_fork = ForkSpec(job=fork.job, step=step, digest=digest)
        return JobParts(spec.model_copy(update={"fork": fixed_fork}))

    async def _parent(self, job_id: str, tenant: str) -> Job:
        """The error does not tell whether another tenant has such a job."""
        with suppress(NotFoundError):
            parent = await self._jobs.get(job_id)
            if parent.status.tenant == tenant:
                return parent
        raise NotFoundError(
            f"fork.job: tenant {tenant!r} has no job {job_id!r}, and a fork stays in the tenant "
            "of its parent"
        )

    async def _checkpoint(
        self, parent: Job, parent_spec: JobSpec, fork: ForkSpec
    ) -> tuple[int, str]:
        """Step and digest of the wanted checkpoint; the best one as the job's status names it."""
        meta = (await self._read(parent.status)).meta
        known = meta.checkpoints
        if fork.step == "best":
            step = best_step(meta, parent_spec)
        elif fork.step == "latest":
            step = max(known, default=None)
        else:
            step = fork.step
        if step is not None and step in known:
            return step, known[step]
        steps = ", ".join(map(str, sorted(known))) or "none yet"
        hint = ""
        if fork.step == "best" and known:
            hint = "; none of these steps was evaluated, so none is the best: use latest"
        wanted = (
            f"of step {fork.step}" if isinstance(fork.step, int) else f"that is the {fork.step}"
        )
        raise ConfigError(
            f"fork.step: job {fork.job} has no checkpoint {wanted}; kept are: {steps}{hint}"
        )

    async def copy(self, plan: ForkPlan, child_id: str) -> dict[str, str | int | float]:
        """Copy checkpoint and ledger for a job that has no record yet; the latter if it trains.

        The checkpoint comes first, since that may take long: the ledger of a parent that goes on
        drops what it does not need any more.

        Returns the fields of its record that its parent's progress decides.

        Raises:
            StateError: the parent, or this checkpoint of it, has been deleted meanwhile.
            UnavailableError: the checkpoint or the ledger cannot be copied.
        """
        await self._copy_files(plan, child_id)
        await self._store.command("UNLINK", *all_keys(plan.tenant, child_id))
        keys = JobKeys(plan.tenant, child_id)
        if not plan.trains:
            await self._write(keys.meta, _measured_meta(plan))
            return {"step": plan.step}
        copier = PayloadCopier(
            self._store,
            source=JobKeys(plan.tenant, plan.parent_id).payloads,
            target=keys.payloads,
            rename=Renaming(plan.parent_id, child_id),
            compress_over_bytes=self._compress_over,
        )
        for _ in range(_SNAPSHOTS):
            found = await self._snapshot(plan)
            try:
                payloads = await copier.copy(_payload_names(found))
            except IntegrityError as error:  # dropped since the ledger was read
                log.info("a fork reads the ledger again", job=child_id, error=error)
                continue
            await self._write_all(found, keys, plan, payloads, copier.rename)
            return {"step": found.meta.step, "incarnation": found.meta.incarnation}
        raise UnavailableError(
            f"fork.job: {plan.parent_id} is faster than its copy; repeat the request"
        )

    async def _copy_files(self, plan: ForkPlan, child_id: str) -> None:
        copy = CheckpointCopy(child_id, plan.step, plan.digest)
        stopped = threading.Event()
        async with self._slots.slot(QueueOwner(plan.tenant)):
            try:
                await asyncio.to_thread(
                    self._files.copy_checkpoint, plan.parent_id, copy, stopped=stopped.is_set
                )
            except NotFoundError as error:
                raise StateError(f"fork.step: {error.message}") from None
            finally:
                stopped.set()

    async def _snapshot(self, plan: ForkPlan) -> _Copy:
        """The ledger as it is now; it still has the checkpoint that was copied."""
        try:
            parent = (await self._jobs.get(plan.parent_id)).status
        except NotFoundError as error:
            raise StateError(f"fork.job: {error.message}") from None
        found = await self._read(parent)
        if found.meta.checkpoints.get(plan.step) != plan.digest:
            raise StateError(
                f"fork.step: job {plan.parent_id} has dropped its checkpoint {plan.step}"
            )
        if plan.step < found.meta.durable:
            return _cut(found, plan.step, batch_groups=plan.batch_groups)
        return _without_leases(_without_evals(found, plan.eval_sets))

    async def _write_all(
        self,
        found: _Copy,
        keys: JobKeys,
        plan: ForkPlan,
        payloads: set[str],
        rename: Renaming,
    ) -> None:
        named = dict(zip(_NAMES, keys.scripts, strict=True))
        for name, values in found.hashes.items():
            await self._write(named[name], {rename(k): rename(v) for k, v in values.items()})
        ring = [(rename(name), place) for name, place in found.ring if name.decode() in payloads]
        for name, place in ring:
            await self._store.command("ZADD", keys.ring, place, name)
        rows = [row for row in found.rows if json.loads(row)["step"] <= plan.step]
        if rows:
            await self._store.command("RPUSH", keys.metrics, *rows)
        await self._write(keys.meta, _meta(found.meta, plan, num_rows=len(rows)))

    async def _read(self, parent: Any) -> _Copy:
        keys = JobKeys(parent.tenant, parent.job_id)
        named = dict(zip(_NAMES, keys.scripts, strict=True))
        hashes = [*_COPIED, "outcomes", "replay", "meta"]
        answers = await self._store.transaction(
            *(("HGETALL", named[name]) for name in hashes),
            ("ZRANGE", keys.ring, 0, -1, "WITHSCORES"),
            ("LRANGE", keys.metrics, 0, -1),
        )
        *found, ring, rows = answers
        by_name = {name: dict(pairs(answer)) for name, answer in zip(hashes, found, strict=True)}
        texts = {k.decode(): v.decode() for k, v in by_name.pop("meta").items()}
        texts.pop("revision", None)
        members = [(each[0], float(each[1])) for each in pairs(ring)]
        return _Copy(by_name, LedgerMeta().changed(texts), members, rows)

    async def _write(self, key: str, values: Mapping[bytes, bytes] | Mapping[str, str]) -> None:
        items = [*values.items()]
        for start in range(0, len(items), _CHUNK):
            flat = [part for item in items[start : start + _CHUNK] for part in item]
            await self._store.command("HSET", key, *flat)


_NAMES = (
    *("counts", "meta", "groups", "batches", "versions", "results", "progress", "ring"),
    *("metrics", "advantages", "memory", "outcomes", "replay", "epoch"),
)


def _payload_names(found: _Copy) -> set[str]:
    """Of the payloads that groups and the pool refer to."""
    results = parse_results(found.hashes["results"].keys(), found.hashes["results"].values())
    groups = [
        parse_group(name.decode(), text, results=results)
        for name, text in found.hashes["groups"].items()
    ]
    names = {name for group in groups for name in group.member_payloads()}
    return names | {json.loads(text)["payload"] for text in found.hashes["replay"].values()}


def _without_evals(copy: _Copy, eval_sets: Collection[str]) -> _Copy:
    """A ledger without open evaluations, which are due again if the fork has them.

    Their tasks and samples may differ there, and no worker has the version that they measure.
    """
    run = copy.meta.eval
    groups = {name: json.loads(text) for name, text in copy.hashes["groups"].items()}
    gone = {name: each for name, each in groups.items() if "version" in each}
    counts = Counter({name: int(n) for name, n in copy.hashes["counts"].items()})
    for states in (each["states"].replace(DROPPED, "") for each in gone.values()):
        if states.strip("m"):
            counts[b"eval:drop:stale"] += len(states)
            counts[b"eval:dropped"] += len(states)
            counts[b"eval:measured"] -= states.count("m")
    counts[b"eval:queued"] = counts[b"eval:leased"] = 0
    results = copy.hashes["results"].items()
    hashes = copy.hashes | {
        "groups": {k: v for k, v in copy.hashes["groups"].items() if k not in gone},
        "results": {k: v for k, v in results if k.rpartition(b"/")[0] not in gone},
        "counts": {name: str(n).encode() for name, n in counts.items() if n},
    }
    open_ = () if run is None else (run.name, *run.then)
    due = [n for n in dict.fromkeys((*open_, *copy.meta.eval_due)) if n in eval_sets]
    return replace(copy, hashes=hashes, meta=replace(copy.meta, eval=None, eval_due=tuple(due)))


def _without_leases(copy: _Copy) -> _Copy:
    """A ledger whose episodes in flight are queued: their workers have them of the parent only."""
    leased, queued = LETTERS[EpisodeState.LEASED], LETTERS[EpisodeState.QUEUED]
    groups, returned = dict(copy.hashes["groups"]), 0
    for name, text in copy.hashes["groups"].items():
        fields = json.loads(text)
        if count := fields["states"].count(leased):
            returned += count
            fields["states"] = fields["states"].replace(leased, queued)
            groups[name] = json.dumps(fields).encode()
    counts = Counter({name: int(n) for name, n in copy.hashes["counts"].items()})
    counts[b"leased"] -= returned
    counts[b"queued"] += returned
    known = {name: str(n).encode() for name, n in counts.items() if n}
    return replace(copy, hashes=copy.hashes | {"groups": groups, "counts": known})


def _cut(copy: _Copy, step: int, *, batch_groups: int) -> _Copy:
    """What is left of a ledger at a checkpoint below the steps that it can rewind to.

    The batches that followed are gone, so nothing of them comes again: the next tasks follow. The
    history says how many episodes and tokens were trained up to the checkpoint.
    """
    rows = [json.loads(row) for row in copy.rows]
    known = [row["values"] for row in rows if (row["kind"], row["step"]) == (Purpose.TRAIN, step)]
    values: dict[str, Any] = known[-1] if known else {}
    episodes = sum(values.get("counts", {}).get(name, 0) for name in ("trained", "durable"))
    groups = step * batch_groups
    counts = {
        "admitted": episodes,
        "durable": episodes,
        **dict.fromkeys(("groups:accepted", "groups:durable", "groups:ended"), groups),
        **{name: values.get(key, 0) for name, key in _TOTALS.items()},
        **{f"stale:{age}": n for age, n in values.get("staleness_histogram", {}).items()},
    }
    empty = dict[bytes, bytes]()
    hashes = copy.hashes | dict.fromkeys(_OF_GROUPS, empty)
    hashes["counts"] = {k.encode(): str(n).encode() for k, n in counts.items() if n}
    meta = replace(copy.meta, step=step, durable=step, exported=Exported(), eval=None, eval_due=())
    return _Copy(hashes, meta, [], copy.rows)


def _measured_meta(plan: ForkPlan) -> dict[str, str]:
    """The fields of a new ledger in which nothing but the weights of a checkpoint is measured."""
    known = {plan.step: plan.digest}
    step = plan.step
    texts = field_texts(step=step, checkpoint_step=step, checkpoints=known, durable=step)
    return {name: text for name, text in texts.items() if text}


def _meta(parent: LedgerMeta, plan: ForkPlan, *, num_rows: int) -> dict[str, str]:
    """The fields of the new ledger: it is paused, and knows one checkpoint."""
    texts = field_texts(
        step=parent.step,
        version=parent.version,
        incarnation=parent.incarnation,
        feed=parent.feed,
        clock=parent.clock,
        checkpoint_step=plan.step,
        checkpoints={plan.step: plan.digest},
        durable=parent.durable,
        exported=parent.exported,
        stop="paused",
        paused=HELD,
        watch=WatchRecord(offset=num_rows),
        eval_due=parent.eval_due,
        eval_sets={
            name: each
            for name, each in parent.eval_sets.items()
            if each.step is None or each.step <= plan.step
        },
    )
    return {name: text for name, text in texts.items() if text}
