"""The input and output of an objective.

Tokens are flat: one entry per trainable policy token of a micro-batch. A sequence is never split
over micro-batches. Denominators count the whole batch, over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scale:
    """Exact denominators of the whole update, over all ranks and micro-batches."""

    tokens: int
    sequences: int
    world: int = 1  # number of ranks; multiplies each local loss, since gradients are averaged


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trainable tokens of one micro-batch. All tensors are float32 [N] unless said otherwise."""

    logprobs: Tensor  # with gradient, at the sampling temperature
    behaviour: Tensor  # log-probs as reported by the engine
    advantages: Tensor
    sequences: Tensor  # int64 [N], in [0, num_sequences)
    num_sequences: int
    scale: Scale
    proximal: Tensor | None = None  # None: one update per batch, so it equals `logprobs`
    weights: Tensor | None = None  # weights of the samples; None: all 1
    reference: Tensor | None = None
    temperature: Tensor | float = 1.0

    @property
    def old(self) -> Tensor:
        """Log-probs under the weights at the start of this batch, without gradient."""
        return self.logprobs.detach() if self.proximal is None else self.proximal


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of one micro-batch. `sums` are over tokens; the trainer divides them by all tokens."""

    value: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


Objective = Callable[[TokenBatch], Loss]
