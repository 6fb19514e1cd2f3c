"""Arguments and results of the slots of an objective.

Tokens are flat: one entry per trainable policy token. A sequence is never split over micro-batches.
Denominators count the whole update, over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.plugins.episodes import progress


@dataclass(frozen=True, slots=True)
class Scale:
    """Exact denominators: of the whole update, over all ranks and micro-batches."""

    tokens: int
    sequences: int
    world: int = 1  # gradients are averaged over ranks, so each local loss is multiplied by it


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trainable tokens of a micro-batch, or of a rank's part of an update.

    All tensors are float32 [N] unless said otherwise. Only `logprobs` and `entropy` carry a
    gradient, and neither does where a plan is made or a correction is computed.
    """

    logprobs: Tensor  # of the current policy, at the sampling temperature
    behaviour: Tensor  # as reported by the engine
    advantages: Tensor
    sequences: Tensor  # int64 [N], in [0, num_sequences)
    num_sequences: int
    scale: Scale
    proximal: Tensor | None = None  # None: equals `logprobs`, as there is one update per batch
    between: Tensor | None = None  # share by which `old` is between `behaviour` and `logprobs`
    weights: Tensor | None = None  # of the samples; None: all one
    keys: Tensor | None = None  # int64 [N], unique over all ranks, in order of row and token
    reference: Tensor | None = None  # if a slot needs `reference`
    entropy: Tensor | None = None  # of the full distribution, if a slot needs `entropy`
    counted: Tensor | None = None  # bool [N], tokens that the denominators count; None: all
    correction: Tensor | None = None  # product of the corrections, for regularisers
    temperature: Tensor | float = 1.0
    ages: Tensor | None = None  # int64 [N], steps between the version that sampled and this step
    replaced: Tensor | None = None  # bool [N], tokens under the task's own prompt that were sampled
    # under a variant of it, so `behaviour` is that of another context; None: none
    of_logits: Tensor | None = None  # what the slot's own function of logits returned
    step: int = 0  # optimiser steps before this one
    total_steps: int = 1

    @property
    def progress(self) -> float:
        """How far the job is: 0 at its first step, 1 at its last."""
        return progress(self.step, self.total_steps)

    @property
    def turns(self) -> Tensor:
        """int64 [N]: the key of the first token of each token's turn.

        A turn is a run of policy tokens with no other token in between.
        """
        assert self.keys is not None
        follows = torch.zeros_like(self.keys, dtype=torch.bool)
        follows[1:] = (self.keys[1:] == self.keys[:-1] + 1) & (
            self.sequences[1:] == self.sequences[:-1]
        )
        return self.keys[~follows][(~follows).cumsum(0) - 1]

    @property
    def old(self) -> Tensor:
        """Log-probs of the proximal policy, the centre of clipping; without gradient."""
        current = self.logprobs.detach()
        if self.between is None:
            return current if self.proximal is None else self.proximal
        mixed = self.behaviour + self.between * (current - self.behaviour)
        if self.proximal is None:
            return mixed
        return torch.where(self.between.isnan(), self.proximal, mixed)

    def among(self, keys: Tensor) -> Tensor:
        """Bool [N]: tokens whose keys are among these."""
        assert self.keys is not None
        return torch.isin(self.keys, keys)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Result of a surrogate."""

    loss: Tensor  # [N]
    clipped: Tensor | None = None  # bool [N]: tokens without a gradient of the surrogate
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # for the log, over tokens


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of one micro-batch. `sums` are sums over tokens, the trainer divides by all tokens."""

    value: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
