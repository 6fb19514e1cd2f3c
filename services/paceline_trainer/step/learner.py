"""One optimiser step: from a rank's samples to the metrics of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidError
from paceline.methods.parts.batch import Scale
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.objective.pipeline import Objective, UpdatePlan
from paceline.telemetry.logs import Log
from paceline_trainer.columns import Columns, Ints, Share, columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.data import Layout, MicroBatch, assemble, idle, plan, policy_tokens
from paceline_trainer.step.mismatch import Mismatch
from paceline_trainer.step.model import PolicyModel, TokenScores, reshard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.tokens import StepKnowledge, StepTokens
from paceline_trainer.traces import Stage, no_stage

MAX_NONFINITE_STEPS = 3  # in a row; then the job fails
_NAMED_GROUPS = 8
log = Log("learner")


@dataclass(slots=True)
class UpdateShard:
    """This rank's sequences of an update, and the totals of all ranks."""

    layout: Layout
    chunks: list[Ints]
    num_micro_batches: int  # maximum over the ranks; those with fewer run idle ones
    scale: Scale
    has_gradient: bool  # an advantage on any rank is not zero


@dataclass(slots=True)
class Tally:
    """Sums and maxima over the micro-batches of a step."""

    loss: Tensor | float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    norms: list[float] = field(default_factory=list[float])
    skipped: int = 0
    nonfinite: int = 0  # updates that were skipped since their loss or gradient was not finite
    fed: int = 0

    def add(self, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        """Add the sums and maxima of one micro-batch."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.double()
        for name, value in maxima.items():
            current = self.maxima.get(name)
            self.maxima[name] = value if current is None else torch.maximum(current, value)


class Learner:
    """Trains the policy on batches. Collective: all ranks step together."""

    def __init__(
        self,
        *,
        policy: PolicyModel,
        optimizer: Optimizer,
        objective: Objective,
        group: RankGroup,
        budget: int,
        mini_batches: int = 1,
        mismatch: Mismatch | None = None,
        reference: PolicyModel | None = None,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._objective = objective
        self._group = group
        self._mismatch = mismatch
        self._reference = reference
        self._entropy = "entropy" in objective.needs
        self._budget = budget
        self._mini_batches = mini_batches
        self._nonfinite_steps = 0  # in a row

    def step(self, share: Share, stage: Stage = no_stage) -> dict[str, float]:
        """Train on this rank's share; returns metrics that are the same on every rank.

        Raises:
            InvalidError: loss or gradient was not finite in several steps in a row.
        """
        with stage("prepare"):
            data = columns(share.samples)
            data.check_vocabulary(self._policy.vocab_size)
            parts = self._parts(data)
            self._check(share, parts)
        with stage("mismatch"):
            mismatch = self._mismatch.measure(data) if self._mismatch is not None else {}
        with stage("score"):
            known = self._known(data, parts)
        tally = Tally()
        for part in parts:
            with stage("update"):
                finite = self._update(data, part, known, tally, step=share.step, stage=stage)
            if not finite:
                self._report_nonfinite(share, data, part)
        self._check_finite(tally, share.step)
        with stage("metrics"):
            return self._metrics(tally, parts, share.step) | mismatch

    def _parts(self, data: Columns) -> list[UpdateShard]:
        split = np.array_split(np.arange(data.num_sequences), self._mini_batches)
        cost, layouts = self._policy.cost(), self._policy.layouts
        plans = [plan(data, s, budget=self._budget, cost=cost, layouts=layouts) for s in split]
        local: list[float] = []
        for rows, (_, chunks) in zip(split, plans, strict=True):
            tokens = int(data.policy_counts[rows].sum())
            local += [tokens, len(rows), float(_has_advantage(data, rows)), len(chunks)]
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

    def _check(self, share: Share, parts: Sequence[UpdateShard]) -> None:
        """Warn if the ledger's counts differ from those of all ranks, which are exact."""
        tokens = sum(part.scale.tokens for part in parts)
        sequences = sum(part.scale.sequences for part in parts)
        if (tokens, sequences) != (share.total_tokens, share.total_sequences):
            log.warning(
                "batch header disagrees with its samples",
                step=share.step,
                batch=share.batch_id,
                tokens=tokens,
                header_tokens=share.total_tokens,
                sequences=sequences,
                header_sequences=share.total_sequences,
            )

    def _known(self, data: Columns, parts: Sequence[UpdateShard]) -> StepTokens:
        """What stays the same during the updates of a step."""
        behaviour = torch.from_numpy(data.behaviour).to(self._group.device)
        known = StepKnowledge(
            behaviour, len(parts), lambda: self._score(self._policy, data, parts).logprobs
        )
        reference = self._reference
        return StepTokens(
            proximal=self._objective.proximal(known),
            reference=None if reference is None else self._score(reference, data, parts).logprobs,
        )

    @torch.no_grad()
    def _score(
        self,
        policy: PolicyModel,
        data: Columns,
        parts: Sequence[UpdateShard],
        *,
        entropy: bool = False,
    ) -> TokenScores:
        """Scores [num_tokens] of this rank's tokens under the weights of a policy."""
        logprobs = torch.zeros(data.num_tokens, device=self._group.device)
        entropies = torch.zeros_like(logprobs) if entropy else None
        for part in parts:
            for index in range(part.num_micro_batches):
                micro = self._assemble(data, part, index)
                scores = _forward(policy, micro, entropy=entropy)
                select = torch.from_numpy(micro.tokens.select)
                logprobs[select] = scores.logprobs
                if entropies is not None and scores.entropy is not None:
                    entropies[select] = scores.entropy
        reshard(policy)
        return TokenScores(logprobs, entropies)

    def _plan(self, data: Columns, part: UpdateShard, known: StepTokens) -> UpdatePlan | None:
        """What slots find in the whole update before its first gradient."""
        if not self._objective.plans:
            return None
        if known.proximal is None or self._objective.plans_on_scores:
            found = self._score(self._policy, data, [part], entropy=self._entropy)
        else:
            found = TokenScores(known.proximal, None)
        rows = np.sort(np.concatenate(part.chunks)) if part.chunks else np.zeros(0, np.int64)
        own = policy_tokens(data, rows, self._group.device)
        select = torch.from_numpy(own.select)
        entropy = None if found.entropy is None else found.entropy[select]
        scores = TokenScores(found.logprobs[select], entropy)
        whole = known.batch(own, scores, part.scale)
        return self._objective.plan(WholeBatch(whole, self._group.gather))

    def _assemble(self, data: Columns, part: UpdateShard, index: int) -> MicroBatch:
        if index >= len(part.chunks):
            return idle(self._group.device)
        return assemble(data, part.chunks[index], part.layout, self._group.device)

    def _update(
        self,
        data: Columns,
        part: UpdateShard,
        known: StepTokens,
        tally: Tally,
        *,
        step: int,
        stage: Stage,
    ) -> bool:
        """Update the policy unless loss or gradient is not finite; returns whether they were."""
        if not part.scale.tokens or not part.has_gradient:
            # Momentum alone must not move the weights.
            tally.skipped += 1
            return True
        with stage("plan"):
            update = self._plan(data, part, known)
        self._optimizer.zero()
        total: Tensor | float = 0.0
        for index in range(part.num_micro_batches):
            with stage("forward"):
                micro = self._assemble(data, part, index)
                scores = _forward(self._policy, micro, entropy=self._entropy)
                tokens = known.batch(micro.tokens, scores, part.scale)
                loss = self._objective.loss(tokens, update)
            with stage("backward"):
                loss.value.backward()
            total = total + loss.value.detach() / part.scale.world
            tally.fed += micro.input_ids.numel()
            tally.add(loss.sums | {"surprise": -scores.logprobs.detach().sum()}, loss.maxima)
        with stage("optimizer"):
            whole = bool(np.isfinite(self._group.gather([float(total)])).all())
            norm = self._optimizer.update(step) if whole else math.nan
        finite = math.isfinite(norm)
        if finite:
            tally.norms.append(norm)
            tally.loss = tally.loss + total
        tally.skipped += not finite
        tally.nonfinite += not finite
        self._optimizer.zero()
        return finite

    def _report_nonfinite(self, share: Share, data: Columns, part: UpdateShard) -> None:
        """Log the groups of this rank whose tokens are not finite under the present weights."""
        found = self._score(self._policy, data, [part]).logprobs.cpu().numpy()
        wrong = ~np.isfinite(found + data.behaviour + data.advantages)
        rows = np.unique(np.repeat(data.rows, data.policy_counts)[wrong])
        names = {sample.row: sample.group_id for sample in share.samples}
        groups = sorted({names[row] for row in rows.tolist()})
        log.error(
            "update skipped: its loss or gradient is not finite",
            step=share.step,
            batch=share.batch_id,
            groups=",".join(groups[:_NAMED_GROUPS]) or "unknown",
            num_groups=len(groups),
        )

    def _check_finite(self, tally: Tally, step: int) -> None:
        self._nonfinite_steps = self._nonfinite_steps + 1 if tally.nonfinite else 0
        if self._nonfinite_steps >= MAX_NONFINITE_STEPS:
            raise InvalidError(
                f"loss or gradient was NaN or infinite in {MAX_NONFINITE_STEPS} steps in a row, "
                f"the last one step {step}; no weights were changed by them, the newest checkpoint "
                "is from before. The log of the trainer names the groups"
            )

    def _metrics(self, tally: Tally, parts: Sequence[UpdateShard], step: int) -> dict[str, float]:
        sums = {name: float(value) for name, value in tally.sums.items()}
        maxima = {name: float(value) for name, value in tally.maxima.items()}
        local = [float(tally.loss), float(tally.fed), *sums.values(), *maxima.values()]
        gathered = self._group.gather(local)
        summed, largest = gathered.sum(axis=0), gathered.max(axis=0)
        sums = dict(zip(sums, summed[2:].tolist(), strict=False))
        maxima = dict(zip(maxima, largest[2 + len(sums) :].tolist(), strict=True))
        tokens = sum(part.scale.tokens for part in parts)
        metrics = {name: value / max(tokens, 1) for name, value in sums.items()} | maxima
        metrics["entropy_estimate"] = metrics.pop("surprise", 0.0)
        return metrics | {
            "loss": float(summed[0]) / len(parts),
            "grad_norm": sum(tally.norms) / max(len(tally.norms), 1),
            "lr": self._optimizer.lr(step),
            "tokens": float(tokens),
            "sequences": float(sum(part.scale.sequences for part in parts)),
            "fed_tokens": float(summed[1]),
            "skipped_updates": float(tally.skipped),
            "nonfinite_updates": float(tally.nonfinite),
        }


def _forward(policy: PolicyModel, micro: MicroBatch, *, entropy: bool) -> TokenScores:
    return policy(
        micro.input_ids,
        micro.position_ids,
        micro.hidden_indices,
        micro.tokens.targets,
        micro.tokens.temperature,
        entropy=entropy,
    )


def _has_advantage(data: Columns, rows: Ints) -> bool:
    return any(
        data.advantages[data.policy_starts[row] : data.policy_starts[row + 1]].any()
        for row in rows.tolist()
    )
