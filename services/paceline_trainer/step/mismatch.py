"""Measures how much engine and trainer disagree on the log-probs of sampled tokens.

For every version, the log-probs of a few sequences are recomputed with exactly the weights that
sampled them, however far the trainer is ahead. Only tokens whose whole prefix was computed by that
version are compared: the KV cache of other tokens is partly that of older weights.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.config.job import JobSpec
from paceline_trainer.columns import Columns, Ints
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.data import assemble, idle
from paceline_trainer.step.model import DTYPES, PolicyModel, reshard

MAX_KNOWN_VERSIONS = 64  # versions whose step is remembered
Shards = list[Tensor]


class WeightHistory:
    """This rank's shards of the newest published weights, in engine precision and main memory."""

    def __init__(
        self, policy: PolicyModel, *, dtype: str, max_versions: int, max_bytes: int
    ) -> None:
        self.policy = policy
        self._dtype = DTYPES[dtype]
        self._max_versions = max_versions
        self._max_bytes = max_bytes
        self._copies: dict[int, Shards] = {}  # by step, oldest first

    def __contains__(self, step: int) -> bool:
        return step in self._copies

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copy the current weights, and drop old copies to stay within the limits."""
        shards = [s.to("cpu", self._dtype, copy=True) for s in self._shards()]
        size = sum(shard.nbytes for shard in shards)
        limit = min(self._max_versions, self._max_bytes // max(size, 1))
        self._copies.pop(step, None)
        for old in list(self._copies)[: max(len(self._copies) + 1 - limit, 0)]:
            del self._copies[old]
        if limit:
            self._copies[step] = shards

    @contextmanager
    def restored(self, step: int) -> Generator[None]:
        """Give the policy the weights of `step` inside the context."""
        current = [shard.to("cpu", copy=True) for shard in self._shards()]
        try:
            self._set(self._copies[step])
            yield
        finally:
            self._set(current)

    @torch.no_grad()
    def _set(self, shards: Shards) -> None:
        reshard(self.policy)
        for local, other in zip(self._shards(), shards, strict=True):
            local.copy_(other)

    def _shards(self) -> Shards:
        found = (parameter.detach() for parameter in self.policy.parameters())
        return [p.to_local() if isinstance(p, DTensor) else p for p in found]


class Mismatch:
    """Measures the versions in each batch. Collective: all ranks measure together."""

    def __init__(
        self, *, group: RankGroup, history: WeightHistory, num_sequences: int, budget: int
    ) -> None:
        self.history = history
        self._group = group
        self._num_sequences = num_sequences
        self._budget = budget
        self._steps: dict[int, int] = {}  # version -> step
        self._sampled: set[int] = set()
        self._checked: set[int] = set()

    def published(self, version: int, step: int) -> None:
        """Share rank 0's newest version and its step with all ranks; negative: there is none."""
        newest, its_step = self._group.gather([version, step])[0].astype(int).tolist()
        if newest >= 0:
            self._steps[newest] = its_step
        for old in list(self._steps)[:-MAX_KNOWN_VERSIONS]:
            del self._steps[old]

    @torch.no_grad()
    def measure(self, data: Columns) -> dict[str, float]:
        """KL from engine to trainer (estimators k1 and k3) over the tokens that can be checked.

        `versions_sampled` and `versions_checked` count versions in the first batch that has them.
        Versions of earlier incarnations are unknown.
        """
        present = self._present(data)
        checked = [v for v in present if self._num_sequences and self._steps[v] in self.history]
        sums, largest = np.zeros(3), 0.0
        for version in checked:
            differences = self._differences(data, version)
            sums += [
                len(differences),
                differences.sum(),
                np.expm1(-differences).sum() + differences.sum(),
            ]
            largest = max(largest, float(np.abs(differences).max(initial=0.0)))
        metrics = {
            "versions_sampled": float(len(set(present) - self._sampled)),
            "versions_checked": float(len(set(checked) - self._checked)),
        }
        self._sampled.update(present)
        self._checked.update(checked)
        return metrics | self._means(sums, largest)

    def _present(self, data: Columns) -> list[int]:
        """Known versions that sampled the first policy token of a sequence on any rank."""
        known, local = sorted(self._steps), set(_first_versions(data).tolist())
        gathered = self._group.gather([float(version in local) for version in known])
        return [version for version, column in zip(known, gathered.T, strict=True) if column.any()]

    def _means(self, sums: NDArray[np.float64], largest: float) -> dict[str, float]:
        gathered = self._group.gather([*sums, largest])
        tokens, k1, k3 = gathered[:, :3].sum(axis=0).tolist()
        if not tokens:
            return {}
        return {
            "mismatch_kl": k3 / tokens,
            "mismatch_k1": k1 / tokens,
            "mismatch_tokens": tokens,
            "logprob_diff_max": float(gathered[:, 3].max()),
        }

    def _differences(self, data: Columns, version: int) -> NDArray[np.float64]:
        """The engine's log-probs minus the trainer's, of this rank's tokens of a version."""
        rows, runs = choose(data, version, limit=self._num_sequences, budget=self._budget)
        micro = assemble(data, rows, "padded", self._group.device) if len(rows) else None
        batch = micro or idle(self._group.device)
        with self.history.restored(self._steps[version]):
            logprobs = self.history.policy(
                batch.input_ids,
                batch.position_ids,
                batch.hidden_indices,
                batch.tokens.targets,
                batch.tokens.temperature,
            ).logprobs
        counts = data.policy_counts[rows]
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        whole = inside < np.repeat(runs, counts)
        return (batch.tokens.behaviour - logprobs).double().cpu().numpy()[whole]


def mismatch_of(spec: JobSpec, policy: PolicyModel, group: RankGroup) -> Mismatch:
    """The `Mismatch` of a job; keeps as many versions as `max_staleness` lets a batch contain."""
    trainer, options = spec.trainer, spec.trainer.mismatch
    publications = spec.experience.max_staleness // trainer.publish_every + 2
    history = WeightHistory(
        policy,
        dtype=spec.model.dtype,
        max_versions=publications if options.sequences else 0,
        max_bytes=options.bytes,
    )
    budget = trainer.tokens_per_micro_batch
    return Mismatch(group=group, history=history, num_sequences=options.sequences, budget=budget)


def _first_versions(data: Columns) -> Ints:
    """The version of each sequence's first policy token."""
    return data.versions[data.policy_starts[:-1]]


def choose(data: Columns, version: int, *, limit: int, budget: int) -> tuple[Ints, Ints]:
    """The sequences that begin with a version's longest runs, and the lengths of these runs."""
    rows = np.flatnonzero(_first_versions(data) == version)
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
