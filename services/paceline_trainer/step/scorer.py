"""Scores a rank's tokens under the present weights, or under earlier and averaged ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.methods.parts.batch import Scale
from paceline_trainer.columns import Columns, Ints
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.average import WeightAverage
from paceline_trainer.step.data import Layout, MicroBatch, PolicyTokens, assemble, idle, plan
from paceline_trainer.step.model import LogitReaders, PolicyModel, TokenScores, reshard
from paceline_trainer.step.versions import VersionSteps, WeightHistory, with_weights


@dataclass(slots=True)
class UpdateShard:
    """This rank's sequences of an update, and the totals of all ranks."""

    layout: Layout
    chunks: list[Ints]
    num_micro_batches: int  # maximum over the ranks; those with fewer run idle ones
    scale: Scale
    has_gradient: bool  # an advantage on any rank is not zero

    @property
    def rows(self) -> Ints:
        """This rank's sequences, ascending."""
        return np.sort(np.concatenate(self.chunks)) if self.chunks else np.zeros(0, np.int64)


class TokenScorer:
    """Forward passes. Collective: all ranks score together."""

    def __init__(self, *, policy: PolicyModel, group: RankGroup, budget: int) -> None:
        self._policy = policy
        self._group = group
        self._budget = budget

    def parts(self, data: Columns, rows: Sequence[Ints]) -> list[UpdateShard]:
        """Split the sequences of each update into micro-batches."""
        cost, layouts = self._policy.cost(), self._policy.layouts
        plans = [plan(data, own, budget=self._budget, cost=cost, layouts=layouts) for own in rows]
        local: list[float] = []
        for own, (_, chunks) in zip(rows, plans, strict=True):
            tokens = int(data.policy_counts[own].sum())
            local += [tokens, len(own), float(_has_advantage(data, own)), len(chunks)]
        world = self._group.rank_info.world
        all_ranks = self._group.gather(local).reshape(world, len(plans), 4)
        return [
            UpdateShard(
                layout=layout,
                chunks=chunks,
                num_micro_batches=int(gathered[:, 3].max()),
                scale=Scale(int(gathered[:, 0].sum()), int(gathered[:, 1].sum()), world),
                has_gradient=bool(gathered[:, 2].any()),
            )
            for (layout, chunks), gathered in zip(plans, all_ranks.transpose(1, 0, 2), strict=True)
        ]

    def micro_batch(self, data: Columns, part: UpdateShard, index: int) -> MicroBatch:
        """One of the micro-batches of a part; beyond its own, a rank has an idle one."""
        if index >= len(part.chunks):
            return idle(self._group.device)
        return assemble(data, part.chunks[index], part.layout, self._group.device)

    def forward(
        self,
        micro: MicroBatch,
        *,
        entropy: bool = False,
        readers: LogitReaders | None = None,
        policy: PolicyModel | None = None,
    ) -> TokenScores:
        """Scores of a micro-batch, with a gradient."""
        return (policy or self._policy)(
            micro.input_ids,
            micro.position_ids,
            micro.hidden_indices,
            micro.tokens.targets,
            micro.tokens.temperature,
            tree=micro.tree,
            entropy=entropy,
            readers=readers,
        )

    @torch.no_grad()
    def score(
        self,
        data: Columns,
        parts: Sequence[UpdateShard],
        *,
        entropy: bool = False,
        policy: PolicyModel | None = None,
        readers: Callable[[PolicyTokens], LogitReaders | None] | None = None,
    ) -> TokenScores:
        """Scores [num_tokens] under the present weights of a policy; 0 for tokens of no part."""
        logprobs = torch.zeros(data.num_tokens, device=self._group.device)
        entropies = torch.zeros_like(logprobs) if entropy else None
        read: list[Tensor] = []
        for part in parts:
            for index in range(part.num_micro_batches):
                micro = self.micro_batch(data, part, index)
                own = readers(micro.tokens) if readers is not None else None
                scores = self.forward(micro, entropy=entropy, policy=policy, readers=own)
                select = torch.from_numpy(micro.tokens.select)
                logprobs[select] = scores.logprobs
                read = read or [torch.zeros_like(logprobs) for _ in scores.of_logits]
                for column, values in zip(read, scores.of_logits, strict=True):
                    column[select] = values
                if entropies is not None and scores.entropy is not None:
                    entropies[select] = scores.entropy
        reshard(policy or self._policy)
        return TokenScores(logprobs, entropies, tuple(read))

    @torch.no_grad()
    def sampled(self, data: Columns, history: WeightHistory, versions: VersionSteps) -> Tensor:
        """Log-probs [num_tokens] under the weights that sampled each token; NaN: not kept.

        A version costs a forward pass over the sequences of all ranks that have tokens of it.
        """
        found = torch.full((data.num_tokens,), torch.nan, device=self._group.device)
        sequences = np.repeat(np.arange(data.num_sequences), data.policy_counts)
        for version in versions.present(data.versions):
            weights = history.find(versions[version])
            if weights is None:
                continue
            own = data.versions == version
            parts = self.parts(data, [np.unique(sequences[own])])
            with with_weights(history.policy, weights):
                scores = self.score(data, parts).logprobs
            select = torch.from_numpy(np.flatnonzero(own)).to(found.device)
            found[select] = scores[select]
        return found

    def averaged(
        self, data: Columns, parts: Sequence[UpdateShard], average: WeightAverage
    ) -> Tensor:
        """Log-probs [num_tokens] under the average of weights."""
        with average.restored():
            return self.score(data, parts).logprobs


def _has_advantage(data: Columns, rows: Ints) -> bool:
    return any(
        data.advantages[data.policy_starts[row] : data.policy_starts[row + 1]].any()
        for row in rows.tolist()
    )
