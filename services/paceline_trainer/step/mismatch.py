"""Measures how much engine and trainer disagree on the log-probs of sampled tokens.

In the first batch that has tokens of a version, the log-probs of a few of its sequences are
recomputed with exactly the weights that sampled them, however far the trainer is ahead. Only
tokens whose whole prefix was computed by that version are compared: the KV cache of other tokens is
partly that of older weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.job import JobSpec
from paceline_trainer.columns import Columns, Ints
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.data import Layout, assemble, idle
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.versions import Shards, VersionSteps, WeightHistory, with_weights

Floats = NDArray[np.float64]


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
        would show.
        """
        present = self.versions.present(_first_versions(data))
        new = [version for version in present if version not in self._sampled]
        checked = [v for v in new if self._num_sequences and self.versions[v] in self.history]
        self._sampled.update(new)
        counts = {"versions_sampled": float(len(new)), "versions_checked": float(len(checked))}
        steps = [self.versions[version] for version in checked]
        weights = [self.history.shards(step) for step in steps]
        differences = self._begun(data, checked, weights, layout)
        return lambda: counts | self._means(differences())

    def _begun(
        self, data: Columns, checked: list[int], weights: list[Shards], layout: Layout
    ) -> Callable[[], Floats]:
        policy = self.history.policy
        if self._thread is None or not checked:
            found = self._differences(policy, data, checked, weights, layout)
            return lambda: found
        self._replica = self._replica or policy.replica()
        work = self._thread.submit(self._differences, self._replica, data, checked, weights, layout)
        return work.result

    def _means(self, differences: Floats) -> dict[str, float]:
        k3 = np.expm1(-differences) + differences
        sums = [len(differences), differences.sum(), k3.sum()]
        gathered = self._group.gather([*sums, np.abs(differences).max(initial=0.0)])
        tokens, k1, k3 = gathered[:, :3].sum(axis=0).tolist()
        if not tokens:
            return {}
        return {
            "mismatch_kl": k3 / tokens,
            "mismatch_k1": k1 / tokens,
            "mismatch_tokens": tokens,
            "logprob_diff_max": float(gathered[:, 3].max()),
        }

    def _differences(
        self,
        policy: PolicyModel,
        data: Columns,
        versions: Sequence[int],
        weights: Sequence[Shards],
        layout: Layout,
    ) -> Floats:
        """The engine's log-probs minus the trainer's, of this rank's tokens of these versions."""
        found = [
            self._differences_of(policy, data, version, shards, layout)
            for version, shards in zip(versions, weights, strict=True)
        ]
        return np.concatenate([np.zeros(0), *found])

    @torch.no_grad()
    def _differences_of(
        self, policy: PolicyModel, data: Columns, version: int, shards: Shards, layout: Layout
    ) -> Floats:
        rows, runs = choose(data, version, limit=self._num_sequences, budget=self._budget)
        micro = assemble(data, rows, layout, self._group.device) if len(rows) else None
        batch = micro or idle(self._group.device)
        with with_weights(policy, shards):
            logprobs = policy(
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


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="mismatch")


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
