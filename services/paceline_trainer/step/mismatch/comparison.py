"""Measures how much engine and trainer disagree on the log-probs of sampled tokens.

In the first batch that has tokens of a version, the log-probs of a few of its sequences are
recomputed with exactly the weights that sampled them, however far the trainer is ahead. Only
tokens whose whole prefix was computed by that version are compared: the KV cache of other tokens is
partly that of older weights. What is compared counts for the worker that sampled it, so that one
that is wrong shows among many that are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.job import JobSpec
from paceline.errors import InvalidError
from paceline.platform.telemetry.logs import Log
from paceline.types import WorkerMismatch
from paceline_trainer.columns import Bools, Columns, Ints
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.data import Layout, assemble, idle
from paceline_trainer.step.mismatch.choice import choose, first_versions, first_workers
from paceline_trainer.step.mismatch.verdicts import (
    LEAST_EXCESS,
    Differences,
    MismatchLimit,
    WorkerCheck,
)
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.versions import Shards, VersionSteps, WeightHistory, with_weights

Floats = NDArray[np.float64]
MAX_MISSED = 2
"""Batches running with tokens of a worker, none of which is compared, until an older version is."""
MADE_UP = frozenset({"simulated"})
"""Engines that compute nothing: their log-probs are not those of any weights."""
log = Log("mismatch")


class Mismatch:
    """Measures each version once. Collective: all ranks measure together."""

    def __init__(
        self,
        *,
        group: RankGroup,
        history: WeightHistory,
        versions: VersionSteps,
        num_sequences: int,
        budget: int,
        on_excess: Literal["stop", "warn", "pass"] = "stop",
        once: bool = True,
    ) -> None:
        """`on_excess`: whether `MismatchLimit` ends the job, is logged only, or does not apply.

        `once`: nothing else needs the weights of a version after its check.
        """
        self._once = once
        self._on_excess = on_excess
        self._limit = None if on_excess == "pass" else MismatchLimit()
        self.history = history
        self.versions = versions
        self.verdicts: tuple[WorkerMismatch, ...] = ()
        """On the workers that were checked in the last step."""
        self._group = group
        self._num_sequences = num_sequences
        self._budget = budget
        self._sampled: set[int] = set()
        self._checked: dict[str, int] = {}  # newest version by worker
        self._missed = Counter[str]()  # batches without a check, by worker
        self._several = False  # workers
        self._replica: PolicyModel | None = None
        self._thread = _thread() if self._beside else None

    @property
    def _beside(self) -> bool:
        """Whether versions are checked while the step trains.

        Sharded weights have to be gathered by all ranks together, and on a GPU a second set of
        weights beside the activations of a step might not fit.
        """
        return self.history.policy.whole and self._group.device.type == "cpu"

    def start(self, data: Columns, layout: Layout) -> Callable[[], dict[str, float]]:
        """Begin to check the versions that earlier batches did not have; returns what waits for it.

        The answer is the KL from engine to trainer (estimators k1 and k3) over the tokens that can
        be checked, if there are some. `versions_sampled` and `versions_checked` count new versions;
        those of earlier incarnations are unknown. `layout`: the one that trains, whose errors this
        would show. What waits raises `InvalidError` for an engine that computes something else.
        """
        self._several = self._several or len(data.worker_names) > 2
        present = self.versions.present(first_versions(data))
        new = [version for version in present if version not in self._sampled]
        late = [version for version in self._late(data, new) if version in present]
        wanted = [*late, *new] if self._num_sequences else []
        kept = {version: self._kept(version) for version in wanted}
        found = {version: weights for version, weights in kept.items() if weights is not None}
        self._sampled.update(new)
        counts = {
            "versions_sampled": float(len(new)),
            "versions_checked": float(len(found.keys() & set(new))),
        }
        checks = self._begun(data, list(found), list(found.values()), layout)
        return lambda: counts | self._judged(checks())

    def _late(self, data: Columns, new: Sequence[int]) -> list[int]:
        """A version to check once more, for a worker whose tokens come later than those of others.

        The first batch of a version may have none of a worker that is slow, or that never stops.
        """
        if not self._several:
            return []
        local = np.full(len(data.worker_names), -1.0)
        np.maximum.at(local, first_workers(data), first_versions(data))
        newest = self._group.gather(local.tolist()).max(axis=0).astype(int).tolist()
        named = zip(data.worker_names, newest, strict=True)
        versions = {name: version for name, version in named if name and version >= 0}
        for name, version in versions.items():
            due = version not in new and version > self._checked.get(name, -1)
            self._missed[name] = self._missed[name] + 1 if due else 0
        due = [name for name in versions if self._missed[name] >= MAX_MISSED]
        return [versions[max(due, key=lambda name: self._missed[name])]] if due else []

    def _kept(self, version: int) -> Shards | None:
        """The weights of a version, which is checked only once if there is one worker."""
        step = self.versions[version]
        weights = self.history.find(step)
        if self._once and not self._several:
            self.history.forget(step)
        return weights

    def _begun(
        self, data: Columns, checked: list[int], weights: list[Shards], layout: Layout
    ) -> Callable[[], list[WorkerCheck]]:
        policy = self.history.policy
        if self._thread is None or not checked:
            found = self._checks(policy, data, checked, weights, layout)
            return lambda: found
        self._replica = self._replica or policy.replica()
        work = self._thread.submit(self._checks, self._replica, data, checked, weights, layout)
        return work.result

    def _judged(self, checks: list[WorkerCheck]) -> dict[str, float]:
        """What all checked tokens say together, unless too many versions running are wrong."""
        self.verdicts = ()
        if not checks:
            return {}
        self._judge(checks)
        by_worker: dict[str, Differences] = {}
        for check in checks:
            before = by_worker.get(check.worker)
            own = check.differences
            by_worker[check.worker] = own if before is None else before.joined(own)
        whole = reduce(Differences.joined, by_worker.values())
        noises = [check.noise for check in checks if check.noise is not None]
        return {
            "mismatch_kl": whole.kl,
            "mismatch_kl_worst": max(own.kl for own in by_worker.values()),
            "mismatch_k1": whole.k1 / whole.tokens,
            "mismatch_tokens": whole.tokens,
            "logprob_diff_max": whole.largest,
        } | ({"mismatch_noise": max(noises)} if noises else {})

    def _judge(self, checks: Sequence[WorkerCheck]) -> None:
        """Set the verdicts; raises if all engines are wrong, and log what else is."""
        for check in checks:
            self._checked[check.worker] = max(check.version, self._checked.get(check.worker, -1))
            self._missed.pop(check.worker, None)
        if self._limit is None:
            return
        verdicts = self._limit.take(checks)
        problem = self._limit.problem
        stops = self._on_excess == "stop"
        if problem and stops:
            raise InvalidError(problem)
        if problem:
            log.warning("engine and trainer disagree", problem=problem)
        self.verdicts = tuple(
            replace(each, at_fault=each.at_fault and stops) for each in verdicts if each.worker_id
        )
        for each in verdicts:
            if each.at_fault:
                log.warning("a worker and the trainer disagree", verdict=each)

    def _checks(
        self,
        policy: PolicyModel,
        data: Columns,
        versions: Sequence[int],
        weights: Sequence[Shards],
        layout: Layout,
    ) -> list[WorkerCheck]:
        return [
            check
            for version, shards in zip(versions, weights, strict=True)
            for check in self._check(policy, data, version, shards, layout)
        ]

    @torch.no_grad()
    def _check(
        self, policy: PolicyModel, data: Columns, version: int, shards: Shards, layout: Layout
    ) -> list[WorkerCheck]:
        """One check for each worker with tokens that are compared, on any rank."""
        rows, runs = choose(
            data,
            version,
            limit=self._num_sequences,
            budget=self._budget,
            checked=self._checked,
        )
        whole = np.zeros(data.num_tokens, dtype=bool)
        for start, run in zip(data.policy_starts[rows].tolist(), runs.tolist(), strict=True):
            whole[start : start + run] = True
        noises: Sequence[float | None] = [None] * len(data.worker_names)
        with with_weights(policy, shards):
            own = self._logprobs(policy, data, rows, layout)
            found = self._by_worker(data, data.behaviour - own, whole)
            beyond = any(not each.kl <= LEAST_EXCESS for each in found)
            if self._limit is not None and beyond:
                other = np.zeros(data.num_tokens)
                for place in range(self._num_sequences):  # as often on all ranks
                    other += self._logprobs(policy, data, rows[place : place + 1], "padded")
                noises = [each.kl for each in self._by_worker(data, other - own, whole)]
        return [
            WorkerCheck(name, version, differences, noise)
            for name, differences, noise in zip(data.worker_names, found, noises, strict=True)
            if differences.tokens
        ]

    def _logprobs(self, policy: PolicyModel, data: Columns, rows: Ints, layout: Layout) -> Floats:
        """Log-probs of all policy tokens of the batch; 0 for those of other sequences."""
        micro = assemble(data, rows, layout, self._group.device) if len(rows) else None
        batch = micro or idle(self._group.device)
        logprobs = policy(
            batch.input_ids,
            batch.position_ids,
            batch.hidden_indices,
            batch.tokens.targets,
            batch.tokens.temperature,
            tree=batch.tree,
        ).logprobs
        found = np.zeros(data.num_tokens)
        if micro is not None:
            found[batch.tokens.select] = logprobs.double().cpu().numpy()
        return found

    def _by_worker(self, data: Columns, differences: Floats, where: Bools) -> list[Differences]:
        """Sums over these tokens on all ranks, by worker."""
        workers, own = data.workers[where], differences[where]
        k3 = np.expm1(-own) + own
        local = np.zeros((4, len(data.worker_names)))
        for row, values in zip(local, (np.ones_like(own), own, k3), strict=False):
            np.add.at(row, workers, values)
        np.maximum.at(local[3], workers, np.abs(own))
        gathered = self._group.gather(local.ravel().tolist()).reshape(-1, *local.shape)
        sums, largest = gathered[:, :3].sum(axis=0), gathered[:, 3].max(axis=0)
        return list(map(Differences, *sums.tolist(), largest.tolist()))


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="mismatch")


def mismatch_of(
    spec: JobSpec,
    policy: PolicyModel,
    group: RankGroup,
    *,
    snapshots: bool = False,
    served: Sequence[str] = (),
) -> Mismatch:
    """The `Mismatch` of a job; keeps as many versions as `max_staleness` lets a batch contain.

    `snapshots`: something else needs them too. `served`: see `WeightHistory`.
    """
    trainer, options = spec.trainer, spec.trainer.mismatch
    publications = spec.experience.max_staleness // trainer.publish_every + 2
    history = WeightHistory(
        policy,
        dtype=spec.model.dtype,
        max_versions=publications if options.sequences or snapshots else 0,
        max_bytes=options.bytes,
        served=served,
    )
    return Mismatch(
        group=group,
        history=history,
        versions=VersionSteps(group),
        num_sequences=options.sequences,
        budget=trainer.tokens_per_micro_batch,
        on_excess="pass" if spec.rollout.engine.kind in MADE_UP else options.on_excess,
        once=not snapshots,
    )
