"""Measures how much engine and trainer disagree on the log-probs of sampled tokens.

In the first batch that has tokens of a version, the log-probs of a few of its sequences are
recomputed with exactly the weights that sampled them, however far the trainer is ahead. Only
tokens whose whole prefix was computed by that version are compared: the KV cache of other tokens is
partly that of older weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.job import JobSpec
from paceline.errors import InvalidError
from paceline.telemetry.logs import Log
from paceline_trainer.columns import Columns, Ints
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.data import Layout, assemble, idle
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.versions import Shards, VersionSteps, WeightHistory, with_weights

Floats = NDArray[np.float64]
LEAST_EXCESS = 0.05  # nats per token; correct engines stay below in any precision
NOISE_RATIO = 20
MAX_EXCESSES = 3  # versions running
log = Log("mismatch")


@dataclass(frozen=True, slots=True)
class Differences:
    """Sums over the compared tokens of all ranks."""

    tokens: float
    k1: float
    k3: float
    largest: float  # absolute difference of log-probs

    @property
    def kl(self) -> float:
        """Nats per token; 0 without tokens."""
        return self.k3 / self.tokens if self.tokens else 0.0

    def joined(self, other: Differences) -> Differences:
        """Over the tokens of both."""
        largest = max(self.largest, other.largest)
        return Differences(
            self.tokens + other.tokens, self.k1 + other.k1, self.k3 + other.k3, largest
        )


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """What the tokens of one version say."""

    version: int
    differences: Differences  # the engine's log-probs minus the trainer's
    noise: float | None = None  # KL between two ways of the trainer itself; measured if it matters

    @property
    def excessive(self) -> bool:
        """Whether engine and trainer differ by more than rounding explains."""
        most = max(LEAST_EXCESS, NOISE_RATIO * (self.noise or 0.0))
        return not self.differences.kl <= most


class MismatchLimit:
    """Finds engines that compute something else than the trainer, version after version."""

    def __init__(self) -> None:
        self._running: list[VersionCheck] = []

    def problem(self, checks: Sequence[VersionCheck]) -> str:
        """What is wrong after these further versions; empty if nothing is."""
        for check in checks:
            self._running = [*self._running, check][-MAX_EXCESSES:] if check.excessive else []
        if len(self._running) < MAX_EXCESSES:
            return ""
        versions = ", ".join(str(check.version) for check in self._running)
        kls = ", ".join(f"{check.differences.kl:.3g}" for check in self._running)
        noise = max(check.noise or 0.0 for check in self._running)
        return (
            f"trainer.mismatch: mismatch_kl of versions {versions} is {kls}; allowed: at most "
            f"{max(LEAST_EXCESS, NOISE_RATIO * noise):.3g} ({NOISE_RATIO} times the trainer's own "
            f"noise, {noise:.2g}, and at least {LEAST_EXCESS}). The engine computes others "
            "from the same weights: use another engine or another precision; "
            "`on_excess: warn` trains in spite of it"
        )


MADE_UP = frozenset({"simulated"})
"""Engines that compute nothing: their log-probs are not those of any weights."""


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
        self._group = group
        self._num_sequences = num_sequences
        self._budget = budget
        self._sampled: set[int] = set()
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
        present = self.versions.present(_first_versions(data))
        new = [version for version in present if version not in self._sampled]
        kept = {version: self._kept(version) for version in new if self._num_sequences}
        found = {version: weights for version, weights in kept.items() if weights is not None}
        self._sampled.update(new)
        counts = {"versions_sampled": float(len(new)), "versions_checked": float(len(found))}
        checks = self._begun(data, list(found), list(found.values()), layout)
        return lambda: counts | self._judged(checks())

    def _kept(self, version: int) -> Shards | None:
        """The weights of a version, which is checked only once."""
        step = self.versions[version]
        weights = self.history.find(step)
        if self._once:
            self.history.forget(step)
        return weights

    def _begun(
        self, data: Columns, checked: list[int], weights: list[Shards], layout: Layout
    ) -> Callable[[], list[VersionCheck]]:
        policy = self.history.policy
        if self._thread is None or not checked:
            found = self._checks(policy, data, checked, weights, layout)
            return lambda: found
        self._replica = self._replica or policy.replica()
        work = self._thread.submit(self._checks, self._replica, data, checked, weights, layout)
        return work.result

    def _judged(self, checks: list[VersionCheck]) -> dict[str, float]:
        """What all checked tokens say together, unless too many versions running are wrong."""
        compared = [check for check in checks if check.differences.tokens]
        if not compared:
            return {}
        problem = "" if self._limit is None else self._limit.problem(compared)
        if problem and self._on_excess == "stop":
            raise InvalidError(problem)
        if problem:
            log.warning("engine and trainer disagree", problem=problem)
        whole = reduce(Differences.joined, (check.differences for check in compared))
        noises = [check.noise for check in compared if check.noise is not None]
        return {
            "mismatch_kl": whole.kl,
            "mismatch_k1": whole.k1 / whole.tokens,
            "mismatch_tokens": whole.tokens,
            "logprob_diff_max": whole.largest,
        } | ({"mismatch_noise": max(noises)} if noises else {})

    def _checks(
        self,
        policy: PolicyModel,
        data: Columns,
        versions: Sequence[int],
        weights: Sequence[Shards],
        layout: Layout,
    ) -> list[VersionCheck]:
        return [
            self._check(policy, data, version, shards, layout)
            for version, shards in zip(versions, weights, strict=True)
        ]

    @torch.no_grad()
    def _check(
        self, policy: PolicyModel, data: Columns, version: int, shards: Shards, layout: Layout
    ) -> VersionCheck:
        rows, runs = choose(data, version, limit=self._num_sequences, budget=self._budget)
        whole = np.zeros(data.num_tokens, dtype=bool)
        for start, run in zip(data.policy_starts[rows].tolist(), runs.tolist(), strict=True):
            whole[start : start + run] = True
        with with_weights(policy, shards):
            own = self._logprobs(policy, data, rows, layout)
            differences = self._summed((data.behaviour - own)[whole])
            if self._limit is None or differences.kl <= LEAST_EXCESS:
                return VersionCheck(version, differences)
            other = np.zeros(data.num_tokens)
            for place in range(self._num_sequences):  # as often on all ranks
                other += self._logprobs(policy, data, rows[place : place + 1], "padded")
        return VersionCheck(version, differences, self._summed((other - own)[whole]).kl)

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

    def _summed(self, differences: Floats) -> Differences:
        """Of all ranks."""
        k3 = np.expm1(-differences) + differences
        sums = [len(differences), differences.sum(), k3.sum()]
        gathered = self._group.gather([*sums, np.abs(differences).max(initial=0.0)])
        tokens, k1, k3 = gathered[:, :3].sum(axis=0).tolist()
        return Differences(tokens, k1, k3, float(gathered[:, 3].max()))


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


def _first_versions(data: Columns) -> Ints:
    """The version of each sequence's first policy token."""
    return data.versions[data.policy_starts[:-1]]


def choose(data: Columns, version: int, *, limit: int, budget: int) -> tuple[Ints, Ints]:
    """The sequences that begin with a version's longest runs, and the lengths of these runs.

    Those whose prompt was replaced tell nothing about the engine.
    """
    rows = np.flatnonzero((_first_versions(data) == version) & ~data.replaced)
    if not len(rows):
        return rows, rows
    starts, counts = data.policy_starts[rows], data.policy_counts[rows]
    runs = np.array(
        [
            int(np.argmin(np.append(data.versions[start : start + count] == version, False)))
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
    )
    order = np.argsort(-runs, kind="stable")[:limit]
    lengths = data.positions[starts[order] + counts[order] - 1]
    fits = np.maximum.accumulate(lengths) * np.arange(1, len(order) + 1) <= budget
    fits[0] = True
    return rows[order][fits], runs[order][fits]
