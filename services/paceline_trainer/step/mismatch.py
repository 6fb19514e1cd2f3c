"""Measures how much engine and trainer disagree on the log-probs of sampled tokens.

In the first batch that has tokens of a version, the log-probs of a few of its sequences are
recomputed with exactly the weights that sampled them, however far the trainer is ahead. Only
tokens whose whole prefix was computed by that version are compared: the KV cache of other tokens is
partly that of older weights.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.job import JobSpec
from paceline_trainer.columns import Columns, Ints
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.data import Layout, assemble, idle
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.versions import VersionSteps, WeightHistory


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
    ) -> None:
        self.history = history
        self.versions = versions
        self._group = group
        self._num_sequences = num_sequences
        self._budget = budget
        self._sampled: set[int] = set()

    @torch.no_grad()
    def measure(self, data: Columns, layout: Layout) -> dict[str, float]:
        """KL from engine to trainer (estimators k1 and k3) over the tokens that can be checked.

        `layout`: the one that trains, whose errors this would show.

        None if the batch has no version that earlier ones had not. `versions_sampled` and
        `versions_checked` count new versions. Versions of earlier incarnations are unknown.
        """
        present = self.versions.present(_first_versions(data))
        new = [version for version in present if version not in self._sampled]
        checked = [v for v in new if self._num_sequences and self.versions[v] in self.history]
        sums, largest = np.zeros(3), 0.0
        for version in checked:
            differences = self._differences(data, version, layout)
            sums += [
                len(differences),
                differences.sum(),
                np.expm1(-differences).sum() + differences.sum(),
            ]
            largest = max(largest, float(np.abs(differences).max(initial=0.0)))
        metrics = {
            "versions_sampled": float(len(new)),
            "versions_checked": float(len(checked)),
        }
        self._sampled.update(new)
        return metrics | self._means(sums, largest)

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

    def _differences(self, data: Columns, version: int, layout: Layout) -> NDArray[np.float64]:
        """The engine's log-probs minus the trainer's, of this rank's tokens of a version."""
        rows, runs = choose(data, version, limit=self._num_sequences, budget=self._budget)
        micro = assemble(data, rows, layout, self._group.device) if len(rows) else None
        batch = micro or idle(self._group.device)
        with self.history.restored(self.versions[version]):
            logprobs = self.history.policy(
                batch.input_ids,
                batch.position_ids,
                batch.hidden_indices,
                batch.tokens.targets,
                batch.tokens.temperature,
                tree=batch.tree,
            ).logprobs
        whole = np.zeros(data.num_tokens, dtype=bool)
        for start, run in zip(data.policy_starts[rows].tolist(), runs.tolist(), strict=True):
            whole[start : start + run] = True
        differences = (batch.tokens.behaviour - logprobs).double().cpu().numpy()
        return differences[whole[batch.tokens.select]]


def mismatch_of(
    spec: JobSpec, policy: PolicyModel, group: RankGroup, *, snapshots: bool = False
) -> Mismatch:
    """The `Mismatch` of a job; keeps as many versions as `max_staleness` lets a batch contain.

    `snapshots`: something else needs them too.
    """
    trainer, options = spec.trainer, spec.trainer.mismatch
    publications = spec.experience.max_staleness // trainer.publish_every + 2
    history = WeightHistory(
        policy,
        dtype=spec.model.dtype,
        max_versions=publications if options.sequences or snapshots else 0,
        max_bytes=options.bytes,
    )
    return Mismatch(
        group=group,
        history=history,
        versions=VersionSteps(group),
        num_sequences=options.sequences,
        budget=trainer.tokens_per_micro_batch,
    )


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
