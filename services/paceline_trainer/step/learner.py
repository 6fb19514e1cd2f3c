"""One optimiser step: from a rank's samples to the metrics of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidError
from paceline.methods.objective.pipeline import Objective, UpdatePlan
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.slots import StepScale
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.platform.free_memory import return_free_memory
from paceline.platform.telemetry.logs import Log
from paceline_trainer.columns import Columns, Share, columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.average import WeightAverage
from paceline_trainer.step.data import PolicyTokens, policy_tokens
from paceline_trainer.step.mismatch.comparison import Mismatch
from paceline_trainer.step.model import LogitReaders, PolicyModel, TokenScores
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.scorer import TokenScorer, UpdateShard
from paceline_trainer.step.tokens import StepKnowledge, StepTokens
from paceline_trainer.traces import Stage, no_stage

MAX_NONFINITE_STEPS = 3  # in a row; then the job fails
_NAMED_GROUPS = 8
log = Log("learner")


@dataclass(slots=True)
class Tally:
    """Sums and maxima over the micro-batches of a step."""

    loss: Tensor | float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    norms: list[float] = field(default_factory=list[float])
    factors: list[float] = field(default_factory=list[float])  # of the learning rate, by hooks
    numbers: list[dict[str, float]] = field(default_factory=list[dict[str, float]])  # of hooks
    skipped: int = 0
    nonfinite: int = 0  # updates that were skipped since their loss or gradient was not finite
    fed: int = 0
    tokens: int = 0  # of all ranks, in updates with a gradient: what sums are over

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
        average: WeightAverage | None = None,
    ) -> None:
        self._policy = policy
        self._average = average
        self._scorer = TokenScorer(policy=policy, group=group, budget=budget)
        self._optimizer = optimizer
        self._objective = objective
        self._group = group
        self._mismatch = mismatch
        self._reference = reference
        self._entropy = "entropy" in objective.needs
        self._mini_batches = mini_batches
        self._nonfinite_steps = 0  # in a row
        self._unchanged: int | None = None  # the step whose weights the policy has a copy of

    def step(self, share: Share, stage: Stage = no_stage) -> dict[str, float]:
        """Train on this rank's share; returns metrics that are the same on every rank.

        Raises:
            InvalidError: loss or gradient was not finite in several steps in a row.
        """
        with stage("prepare"):
            data = columns(share.samples, share.workers)
            data.check_vocabulary(self._policy.vocab_size)
            rows = np.array_split(np.arange(data.num_sequences), self._mini_batches)
            parts = self._scorer.parts(data, rows)
            self._check(share, parts)
        with stage("mismatch"):
            checked = self._mismatch
            mismatch = None if checked is None else checked.start(data, parts[0].layout)
        with stage("score"):
            known = self._known(data, parts, share)
        tally, self._unchanged = Tally(), share.step
        for part in parts:
            with stage("update"):
                self._update(share, data, part, known, tally, stage)
        self._check_finite(tally, share.step)
        with stage("metrics"):
            metrics = self._metrics(tally, parts, known, share.step)
        with stage("mismatch"):
            checks = {} if mismatch is None else mismatch()
        return metrics | checks | self._follow(tally, metrics)

    @property
    def scorer(self) -> TokenScorer:
        """Splits batches into micro-batches, and scores their tokens."""
        return self._scorer

    def state(self) -> dict[str, Any]:
        """Tensors of slots that a checkpoint has to keep; loading one fills them in place."""
        return {} if self._average is None else self._average.state()

    def start_again(self) -> None:
        """Begin without the state of a checkpoint, with the weights that were loaded."""
        if self._average is not None:
            self._average.start_again()

    def _follow(self, tally: Tally, metrics: dict[str, float]) -> dict[str, float]:
        """Let the average follow the weights, if an update has changed them."""
        if self._average is None or not tally.norms:
            return {}
        return {"average_reset": float(self._average.follow(metrics["active_fraction"]))}

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

    def _known(self, data: Columns, parts: Sequence[UpdateShard], share: Share) -> StepTokens:
        """What stays the same during the updates of a step."""
        scorer, mismatch, average = self._scorer, self._mismatch, self._average
        behaviour = torch.from_numpy(data.behaviour).to(self._group.device)
        ages = torch.from_numpy(share.ages(data.versions)).to(self._group.device)

        def sampled() -> Tensor:
            if mismatch is None:
                return torch.full_like(behaviour, torch.nan)
            return scorer.sampled(data, mismatch.history, mismatch.versions)

        def averaged() -> Tensor:
            if average is None:
                raise InvalidError("only a proximal policy that needs weight_average has one")
            return scorer.averaged(data, parts, average)

        known = StepKnowledge(
            behaviour=behaviour,
            ages=ages,
            num_updates=len(parts),
            current=lambda: scorer.score(data, parts).logprobs,
            sampled=sampled,
            averaged=averaged,
        )
        return StepTokens(
            centre=self._objective.centre(known),
            reference=self._reference_scores(data, parts),
            ages=ages,
            step=share.step,
            total_steps=self._optimizer.total_steps,
        )

    def _reference_scores(self, data: Columns, parts: Sequence[UpdateShard]) -> Tensor | None:
        reference = self._reference
        if reference is None:
            return None
        with reference.without_adapters():
            return self._scorer.score(data, parts, policy=reference).logprobs

    def _plan(self, data: Columns, part: UpdateShard, known: StepTokens) -> UpdatePlan | None:
        """What slots find in the whole update before its first gradient."""
        if not self._objective.plans:
            return None
        fixed = known.proximal if known.between is None else None
        if fixed is None or self._objective.plans_on_scores:
            found = self._scorer.score(data, [part], entropy=self._entropy)
        else:
            found = TokenScores(fixed, None)
        return self._objective.plan(self._whole(data, part, known, found))

    def _whole(
        self, data: Columns, part: UpdateShard, known: StepTokens, found: TokenScores
    ) -> WholeBatch:
        """All tokens of an update, with scores [num_tokens]."""
        own = policy_tokens(data, part.rows, self._group.device)
        return WholeBatch(self._tokens(own, part, known, found), self._group.gather)

    def _tokens(
        self, own: PolicyTokens, part: UpdateShard, known: StepTokens, found: TokenScores
    ) -> TokenBatch:
        """The tokens of some sequences of an update, from scores [num_tokens]."""
        select = torch.from_numpy(own.select)
        entropy = None if found.entropy is None else found.entropy[select]
        return known.batch(own, TokenScores(found.logprobs[select], entropy), part.scale)

    def _update(
        self,
        share: Share,
        data: Columns,
        part: UpdateShard,
        known: StepTokens,
        tally: Tally,
        stage: Stage,
    ) -> None:
        """Update the policy unless loss or gradient is not finite."""
        if not part.scale.tokens or not part.has_gradient:
            # Momentum alone must not move the weights.
            tally.skipped += 1
            return
        tally.tokens += part.scale.tokens
        with stage("plan"):
            update = self._plan(data, part, known)
        self._optimizer.zero()
        total: Tensor | float = 0.0
        seen = torch.zeros(data.num_tokens, device=self._group.device)
        for index in range(part.num_micro_batches):
            with stage("forward"):
                self._share_served()
                micro = self._scorer.micro_batch(data, part, index)
                readers = self._readers(micro.tokens, share.step)
                scores = self._scorer.forward(micro, entropy=self._entropy, readers=readers)
                tokens = known.batch(micro.tokens, scores, part.scale)
                loss = self._objective.loss(tokens, update, scores.of_logits)
            with stage("backward"):
                loss.value.backward()
            total = total + loss.value.detach() / part.scale.world
            if self._objective.hooks:
                seen[torch.from_numpy(micro.tokens.select)] = scores.logprobs.detach()
            tally.fed += micro.input_ids.numel()
            tally.add(loss.sums | {"surprise": -scores.logprobs.detach().sum()}, loss.maxima)
        with stage("optimizer"):
            hooked = bool(self._objective.hooks)
            whole = self._whole(data, part, known, TokenScores(seen, None)) if hooked else None
            wrong = self._step_optimizer(whole, total, tally, share.step)
        if wrong:
            self._report_nonfinite(share, data, part, known, update, wrong)

    def _share_served(self) -> None:
        """Compute with the served copy of the weights once it is there, and free the policy's own.

        Between two micro-batches, as a graph refers to the weights that it was made with.
        """
        if self._unchanged is None or self._mismatch is None:
            return
        served = self._mismatch.history.kept(self._unchanged)
        if served is not None:
            self._unchanged = None
            if self._policy.share(served):
                return_free_memory()

    def _readers(self, own: PolicyTokens, step: int) -> LogitReaders | None:
        slots = self._objective.logit_slots
        if not slots:
            return None
        return LogitReaders([slot.on_logits for slot in slots], own.keys, step)

    def _step_optimizer(
        self, whole: WholeBatch | None, total: Tensor | float, tally: Tally, step: int
    ) -> str:
        """Take the step that the gradients and hooks ask for; returns what was not finite."""
        wrong = "" if np.isfinite(self._group.gather([float(total)])).all() else "loss"
        if not wrong:
            scale = StepScale(1.0) if whole is None else self._objective.scale_step(whole)
            tally.factors.append(scale.factor)
            tally.numbers.append(scale.log)
            vetoed = not scale.factor
            self._policy.settle()
            self._unchanged = None
            norm = 0.0 if vetoed else self._optimizer.update(step, factor=scale.factor)
            wrong = "" if math.isfinite(norm) else "gradient"
            still = not wrong and norm == 0.0  # a veto, or no token with a gradient
            tally.skipped += still
            if not wrong and not still:
                tally.norms.append(norm)
                tally.loss = tally.loss + total
        tally.skipped += bool(wrong)
        tally.nonfinite += bool(wrong)
        self._optimizer.zero()
        return wrong

    @torch.no_grad()
    def _report_nonfinite(
        self,
        share: Share,
        data: Columns,
        part: UpdateShard,
        known: StepTokens,
        update: UpdatePlan | None,
        wrong: str,
    ) -> None:
        """Log the groups of this rank whose own loss is not finite under the present weights.

        Collective. There are none if only the gradient is not finite.
        """
        readers = partial(self._readers, step=share.step)
        scores = self._scorer.score(data, [part], entropy=self._entropy, readers=readers)
        group_of = {sample.row: sample.group_id for sample in share.samples}
        rows_of: dict[str, list[int]] = {}
        for row in part.rows.tolist():
            rows_of.setdefault(group_of[int(data.rows[row])], []).append(row)
        groups: list[str] = []
        for name, rows in sorted(rows_of.items()):
            own = policy_tokens(data, np.array(rows), self._group.device)
            read = [column[torch.from_numpy(own.select)] for column in scores.of_logits]
            loss = self._objective.loss(self._tokens(own, part, known, scores), update, read)
            if not math.isfinite(float(loss.value)):
                groups.append(name)
        log.error(
            f"update skipped: its {wrong} is not finite",
            step=share.step + 1,
            batch=share.batch_id,
            groups=",".join(groups[:_NAMED_GROUPS]) or "unknown",
            num_groups=len(groups),
        )

    def _check_finite(self, tally: Tally, step: int) -> None:
        self._nonfinite_steps = self._nonfinite_steps + 1 if tally.nonfinite else 0
        if self._nonfinite_steps >= MAX_NONFINITE_STEPS:
            raise InvalidError(
                f"trainer.objective: loss or gradient was NaN or infinite in {MAX_NONFINITE_STEPS} "
                f"steps in a row, the last one step {step + 1}. These updates were skipped, so "
                "they changed no weights; the log of the trainer names their groups. Check the "
                "slots of the objective and trainer.optimizer.lr"
            )

    def _metrics(
        self, tally: Tally, parts: Sequence[UpdateShard], known: StepTokens, step: int
    ) -> dict[str, float]:
        sums = {name: float(value) for name, value in tally.sums.items()}
        maxima = {name: float(value) for name, value in tally.maxima.items()}
        maxima["token_age_max"] = float(known.ages.max()) if known.ages.numel() else 0.0
        ages = float(known.ages.sum())
        local = [float(tally.loss), float(tally.fed), ages, *sums.values(), *maxima.values()]
        gathered = self._group.gather(local)
        summed, largest = gathered.sum(axis=0), gathered.max(axis=0)
        sums = dict(zip(sums, summed[3:].tolist(), strict=False))
        maxima = dict(zip(maxima, largest[3 + len(sums) :].tolist(), strict=True))
        tokens = sum(part.scale.tokens for part in parts)
        metrics = {name: value / max(tally.tokens, 1) for name, value in sums.items()} | maxima
        metrics["token_age"] = float(summed[2]) / max(tokens, 1)
        metrics["entropy_estimate"] = metrics.pop("surprise", 0.0)
        squares = metrics.pop("behaviour_weight_squared", 0.0)
        if squares:
            metrics["ess"] = metrics["behaviour_weight"] ** 2 / squares
        if self._objective.hooks and tally.factors:
            metrics["lr_factor"] = sum(tally.factors) / len(tally.factors)
            for name in tally.numbers[0]:
                metrics[name] = sum(own[name] for own in tally.numbers) / len(tally.numbers)
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
