"""How far engine and trainer disagree on the log-probs of tokens that one version sampled.

For every version, a few of its sequences are computed again with exactly the weights that sampled
them, however far the trainer has moved on. Only tokens whose whole prefix that version computed
are compared: behind the others stands a KV cache of older weights.
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
from paceline_trainer.data import assemble, idle
from paceline_trainer.distributed import Group
from paceline_trainer.model import DTYPES, Policy, reshard
from paceline_trainer.take import Columns, Ints

MOST_KNOWN = 64  # publications whose step is remembered
Shards = list[Tensor]


class Past:
    """This rank's shards of the newest publications, in engine precision, in main memory."""

    def __init__(self, policy: Policy, *, dtype: str, most_versions: int, most_bytes: int) -> None:
        self.policy = policy
        self._dtype = DTYPES[dtype]
        self._most_versions = most_versions
        self._most_bytes = most_bytes
        self._held: dict[int, Shards] = {}  # by step, oldest first

    def __contains__(self, step: int) -> bool:
        return step in self._held

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copy the present weights; as many old ones go as the bounds ask for."""
        shards = [s.to("cpu", self._dtype, copy=True) for s in self._shards()]
        size = sum(shard.nbytes for shard in shards)
        most = min(self._most_versions, self._most_bytes // max(size, 1))
        self._held.pop(step, None)
        for old in list(self._held)[: max(len(self._held) + 1 - most, 0)]:
            del self._held[old]
        if most:
            self._held[step] = shards

    @contextmanager
    def restored(self, step: int) -> Generator[None]:
        """The policy has the weights of `step` inside the block."""
        now = [shard.to("cpu", copy=True) for shard in self._shards()]
        try:
            self._set(self._held[step])
            yield
        finally:
            self._set(now)

    @torch.no_grad()
    def _set(self, shards: Shards) -> None:
        reshard(self.policy)
        for mine, other in zip(self._shards(), shards, strict=True):
            mine.copy_(other)

    def _shards(self) -> Shards:
        found = (parameter.detach() for parameter in self.policy.parameters())
        return [p.to_local() if isinstance(p, DTensor) else p for p in found]


class Mismatch:
    """Measures versions as they turn up in batches. Collective: all ranks measure together."""

    def __init__(self, *, group: Group, past: Past, num_sequences: int, budget: int) -> None:
        self.past = past
        self._group = group
        self._num_sequences = num_sequences
        self._budget = budget
        self._steps: dict[int, int] = {}  # version -> step, of publications that are known
        self._sampled: set[int] = set()
        self._checked: set[int] = set()

    def published(self, version: int, step: int) -> None:
        """Learn rank 0's newest publication; negative: there is none."""
        newest, its_step = self._group.gather([version, step])[0].astype(int).tolist()
        if newest >= 0:
            self._steps[newest] = its_step
        for old in list(self._steps)[:-MOST_KNOWN]:
            del self._steps[old]

    @torch.no_grad()
    def measure(self, data: Columns) -> dict[str, float]:
        """KL from engine to trainer (estimators k1 and k3) over what could be checked.

        `versions_sampled` and `versions_checked` count versions when they first turn up. Those
        of an earlier incarnation are unknown.
        """
        present = self._present(data)
        checked = [v for v in present if self._num_sequences and self._steps[v] in self.past]
        sums, worst = np.zeros(3), 0.0
        for version in checked:
            apart = self._apart(data, version)
            sums += [len(apart), apart.sum(), np.expm1(-apart).sum() + apart.sum()]
            worst = max(worst, float(np.abs(apart).max(initial=0.0)))
        metrics = {
            "versions_sampled": float(len(set(present) - self._sampled)),
            "versions_checked": float(len(set(checked) - self._checked)),
        }
        self._sampled.update(present)
        self._checked.update(checked)
        return metrics | self._means(sums, worst)

    def _present(self, data: Columns) -> list[int]:
        """Versions that began a sequence on any rank."""
        known, mine = sorted(self._steps), set(_first_versions(data).tolist())
        seen = self._group.gather([float(version in mine) for version in known])
        return [version for version, column in zip(known, seen.T, strict=True) if column.any()]

    def _means(self, sums: NDArray[np.float64], worst: float) -> dict[str, float]:
        seen = self._group.gather([*sums, worst])
        tokens, k1, k3 = seen[:, :3].sum(axis=0).tolist()
        if not tokens:
            return {}
        return {
            "mismatch_kl": k3 / tokens,
            "mismatch_k1": k1 / tokens,
            "mismatch_tokens": tokens,
            "logprob_diff_max": float(seen[:, 3].max()),
        }

    def _apart(self, data: Columns, version: int) -> NDArray[np.float64]:
        """Engine's minus trainer's log-probs of this rank's tokens of a version."""
        rows, runs = choose(data, version, most=self._num_sequences, budget=self._budget)
        micro = assemble(data, rows, "padded", self._group.device) if len(rows) else None
        feed = micro or idle(self._group.device)
        with self.past.restored(self._steps[version]):
            logprobs = self.past.policy(
                feed.input_ids, feed.position_ids, feed.where, feed.targets, feed.temperature
            )
        counts = data.policy_counts[rows]
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        whole = inside < np.repeat(runs, counts)
        return (feed.behaviour - logprobs).double().cpu().numpy()[whole]


def mismatch_of(spec: JobSpec, policy: Policy, group: Group) -> Mismatch:
    """As the job asks for; so many publications can be behind a batch within its bound."""
    trainer, asked = spec.trainer, spec.trainer.mismatch
    publications = spec.experience.max_staleness // trainer.publish_every + 2
    past = Past(
        policy,
        dtype=spec.model.dtype,
        most_versions=publications if asked.sequences else 0,
        most_bytes=asked.bytes,
    )
    budget = trainer.tokens_per_micro_batch
    return Mismatch(group=group, past=past, num_sequences=asked.sequences, budget=budget)


def _first_versions(data: Columns) -> Ints:
    """Of each sequence's first policy token."""
    return data.versions[data.policy_starts[:-1]]


def choose(data: Columns, version: int, *, most: int, budget: int) -> tuple[Ints, Ints]:
    """Sequences that a version began, with its longest runs, and those runs' lengths."""
    rows = np.flatnonzero(_first_versions(data) == version)
    if not len(rows):
        return rows, rows
    starts, counts = data.policy_starts[rows], data.policy_counts[rows]
    runs = np.array(
        [
            int(np.argmin(np.append(data.versions[at : at + count] == version, False)))
            for at, count in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
    )
    order = np.argsort(-runs, kind="stable")[:most]
    lengths = data.positions[starts[order] + counts[order] - 1]
    fits = np.maximum.accumulate(lengths) * np.arange(1, len(order) + 1) <= budget
    fits[0] = True
    return rows[order][fits], runs[order][fits]
