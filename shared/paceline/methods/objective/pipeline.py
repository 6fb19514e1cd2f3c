"""Calls the slots of an objective: a plan for each update, then a loss for each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidError
from paceline.methods.objective.slot import Slot
from paceline.methods.parts.batch import Loss, Scale, TokenBatch
from paceline.methods.parts.proximal import Between, KnownTokens
from paceline.methods.parts.slots import StepScale
from paceline.methods.parts.surrogates import k3, log_ratio
from paceline.methods.parts.whole_batch import WholeBatch


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Plans of the slots for a whole update, by slot, and its denominators."""

    by_slot: dict[str, tuple[Any, ...]]
    scale: Scale


class Objective:
    """Slots in a fixed order: shaping, corrections, surrogate, regularisers, aggregation."""

    def __init__(
        self,
        *,
        proximal: Slot,
        shaping: Sequence[Slot] = (),
        corrections: Sequence[Slot] = (),
        surrogate: Slot,
        regularisers: Sequence[Slot] = (),
        aggregation: Slot,
        hooks: Sequence[Slot] = (),
    ) -> None:
        self.proximal = proximal
        self._shaping = shaping
        self._corrections = corrections
        self._surrogate = surrogate
        self._regularisers = regularisers
        self._aggregation = aggregation
        self.hooks = hooks
        self._after_masks = getattr(aggregation.options, "denominator", "") == "after_masks"

    @property
    def slots(self) -> list[Slot]:
        """All slots that see tokens, in the order of their calls."""
        return [*self._shaping, *self._corrections, self._surrogate, *self._regularisers]

    @property
    def needs(self) -> frozenset[str]:
        """Quantities that the trainer has to compute for the slots."""
        return self.proximal.needs.union(*(slot.needs for slot in (*self.slots, *self.hooks)))

    @property
    def plans(self) -> bool:
        """Whether a plan is made for each update."""
        return self._after_masks or any(slot.planned for slot in self.slots)

    @property
    def plans_on_scores(self) -> bool:
        """Whether plans need a forward pass with the current policy."""
        plans = [slot.planned for slot in self.slots if slot.planned is not None]
        return "entropy" in self.needs or any(plan.needs_logprobs for plan in plans)

    @property
    def logit_slots(self) -> list[Slot]:
        """Slots that read logits, in the order of the results that `loss` is given."""
        losses = (self._surrogate, *self._regularisers)
        return [slot for slot in losses if slot.of_logits is not None]

    def centre(self, known: KnownTokens) -> Between | Tensor | None:
        """Log-probs [N] of the proximal policy; None: equal to those of the only update."""
        center: Between | Tensor | None = self.proximal(known)
        return center

    @torch.no_grad()
    def scale_step(self, whole: WholeBatch) -> StepScale:
        """Ask the hooks for the factor of the learning rate of an update. Collective.

        Raises:
            InvalidError: a factor is negative or not finite.
        """
        factor, numbers = 1.0, dict[str, float]()
        for hook in self.hooks:
            own: StepScale = hook(whole)
            if not 0.0 <= own.factor < math.inf:
                raise InvalidError(
                    f"trainer.hooks {hook.name!r}: factor {own.factor}; allowed: finite, 0 or more"
                )
            factor *= own.factor
            numbers |= {f"{hook.name}_{name}": value for name, value in own.log.items()}
        return StepScale(factor, numbers)

    @torch.no_grad()
    def plan(self, whole: WholeBatch) -> UpdatePlan:
        """Look at a whole update before its first gradient. Collective."""
        by_slot: dict[str, tuple[Any, ...]] = {}
        for slot in self._shaping:
            by_slot[slot.name] = slot.plan(whole)
            shaped = slot(whole.tokens, *by_slot[slot.name])
            whole = whole.on(replace(whole.tokens, advantages=shaped))
        for slot in (*self._corrections, self._surrogate, *self._regularisers):
            by_slot[slot.name] = slot.plan(whole)
        scale = whole.tokens.scale
        if self._after_masks:
            kept = self._weights(whole.tokens, by_slot, _ignore) > 0
            sequences = whole.tokens.sequences[kept].unique().numel()
            scale = replace(scale, tokens=whole.count(kept), sequences=whole.total(sequences))
        return UpdatePlan(by_slot, scale)

    def loss(
        self, tokens: TokenBatch, plan: UpdatePlan | None = None, of_logits: Sequence[Tensor] = ()
    ) -> Loss:
        """The loss of a micro-batch, with sums and maxima for the log of each slot.

        `of_logits`: the result of each of the `logit_slots`, [N].
        """
        by_slot = {} if plan is None else plan.by_slot
        names = [slot.name for slot in self.logit_slots]
        logits_by_slot = dict(zip(names, of_logits, strict=True))
        log = _SlotLog(tokens)
        for slot in self._shaping:
            shaped = slot(_detached(tokens), *by_slot.get(slot.name, ()))
            tokens = replace(tokens, advantages=shaped)
        weights = self._weights(_detached(tokens), by_slot, log.weights)
        inputs = _with_logits(tokens, self._surrogate, logits_by_slot)
        surrogate = self._surrogate(inputs, *by_slot.get(self._surrogate.name, ()))
        log.surrogate(tokens, surrogate.clipped, weights)
        log.sums |= {f"{self._surrogate.name}_{name}": x for name, x in surrogate.sums.items()}
        counted = weights > 0 if self._after_masks else None
        scale = tokens.scale if plan is None else plan.scale
        tokens = replace(tokens, correction=weights, counted=counted, scale=scale)
        losses = surrogate.loss * weights
        for slot in self._regularisers:
            inputs = _with_logits(tokens, slot, logits_by_slot)
            added = slot(inputs, *by_slot.get(slot.name, ()))
            if counted is not None:  # as many tokens as the loss is divided by
                added = added * counted
            log.sums[slot.name] = added.detach().sum()
            losses = losses + added
        if tokens.weights is not None:
            losses = losses * tokens.weights
        return Loss(self._aggregation(losses, tokens), log.sums, log.maxima)

    def _weights(
        self,
        tokens: TokenBatch,
        by_slot: dict[str, tuple[Any, ...]],
        record: Callable[[str, Tensor], None],
    ) -> Tensor:
        weights = torch.ones_like(tokens.behaviour)
        for slot in self._corrections:
            own = slot(tokens, *by_slot.get(slot.name, ())).detach()
            record(slot.name, own)
            weights = weights * own
        return weights


class _SlotLog:
    """Sums over the tokens of a micro-batch, and maxima, by metric."""

    def __init__(self, tokens: TokenBatch) -> None:
        weight = log_ratio(tokens.old, tokens.behaviour).exp()
        self.sums: dict[str, Tensor] = {
            "behaviour_weight": weight.sum(),
            "behaviour_weight_squared": weight.square().sum(),
        }
        self.maxima: dict[str, Tensor] = {"behaviour_weight_max": _largest(weight)}
        current = tokens.logprobs.detach()
        self.sums["kl_behaviour"] = _kl(tokens.behaviour, current)
        if tokens.proximal is not None or tokens.between is not None:
            self.sums["kl_proximal"] = _kl(tokens.old, current)
        if tokens.between is not None:
            self.sums["interpolated"] = (~tokens.between.isnan()).sum()
        if tokens.reference is not None:
            self.sums["kl_reference"] = _kl(current, tokens.reference)

    def weights(self, name: str, weights: Tensor) -> None:
        self.sums[f"{name}_zeroed"] = (weights == 0).sum()
        self.sums[f"{name}_weight"] = weights.sum()
        self.maxima[f"{name}_weight_max"] = _largest(weights)

    def surrogate(self, tokens: TokenBatch, clipped: Tensor | None, weights: Tensor) -> None:
        ratio = log_ratio(tokens.logprobs.detach(), tokens.old).exp()
        none = torch.zeros_like(weights, dtype=torch.bool)
        cut = none if clipped is None else clipped
        self.sums |= {
            "ratio": ratio.sum(),
            "clip_fraction": cut.sum(),
            "out_of_bounds": (weights == 0).sum(),
            "active_fraction": ((weights > 0) & ~cut).sum(),
        }
        self.maxima["ratio_max"] = _largest(ratio)


def _with_logits(tokens: TokenBatch, slot: Slot, by_slot: Mapping[str, Tensor]) -> TokenBatch:
    return replace(tokens, of_logits=by_slot[slot.name]) if slot.name in by_slot else tokens


def _detached(tokens: TokenBatch) -> TokenBatch:
    entropy = None if tokens.entropy is None else tokens.entropy.detach()
    return replace(tokens, logprobs=tokens.logprobs.detach(), entropy=entropy)


def _ignore(name: str, weights: Tensor) -> None:
    del name, weights


def _kl(sampled: Tensor, other: Tensor) -> Tensor:
    """The sum over tokens of the k3 estimate of KL(sampled || other)."""
    return k3(log_ratio(sampled, other)).sum()


def _largest(values: Tensor) -> Tensor:
    """The maximum of non-negative values; 0 if empty."""
    return values.max() if values.numel() else values.new_zeros(())
