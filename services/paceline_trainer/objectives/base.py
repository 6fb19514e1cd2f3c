"""What every objective takes and gives, and the pieces they share.

Tokens are flat: one entry for each trainable policy token of a micro-batch. A sequence is never
split over micro-batches. Denominators are those of the whole batch, over all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor

from paceline import plugins
from paceline.config.base import Plugin
from paceline.config.load import validate
from paceline.errors import ConfigError, InvalidError
from paceline_trainer.objectives.options import ClipOptions

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Exact denominators: of the whole update, over all ranks and micro-batches."""

    tokens: int
    sequences: int
    world: int = 1  # gradients are averaged over ranks, so each local loss is multiplied by it


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trainable tokens of one micro-batch. All tensors are float32 [N] unless said otherwise."""

    logprobs: Tensor  # with gradient, at the sampling temperature
    behaviour: Tensor  # as the engine reported them
    advantages: Tensor
    sequences: Tensor  # int64 [N], in [0, num_sequences)
    num_sequences: int
    scale: Scale
    proximal: Tensor | None = None  # None: one update per batch, so it equals `logprobs`
    weights: Tensor | None = None  # of the samples; None: all one
    reference: Tensor | None = None
    temperature: Tensor | float = 1.0

    @property
    def old(self) -> Tensor:
        """Log-probs under the weights at the start of this batch, without gradient."""
        return self.logprobs.detach() if self.proximal is None else self.proximal


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of one micro-batch. `sums` are sums over tokens, the trainer divides by all tokens."""

    value: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


Objective = Callable[[TokenBatch], Loss]


def load_objective(plugin: Plugin) -> Objective:
    """The objective with its options checked and bound.

    Raises:
        InvalidError: no such plug-in, or an option that it does not have.
    """
    function: Callable[..., Loss] = plugins.find("objectives", plugin.kind)
    where = f"trainer.objective {plugin.kind!r}"
    if not callable(function) or "options" not in inspect.signature(function).parameters:
        raise InvalidError(f"{where}: must be a function of (batch, options)")
    model: Any = get_type_hints(function)["options"]
    try:
        options = validate(model, plugin.options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if getattr(options, "kl", 0.0):
        raise ConfigError(f"{where}: kl: needs a reference policy, which this trainer has not")
    bound: Objective = partial(function, options=options)
    return bound


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """`new - old`, safe to exponentiate: what is not finite becomes 0 before the exponent."""
    difference = new - old
    sound = torch.where(torch.isfinite(difference), difference, torch.zeros_like(difference))
    return sound.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped(ratio: Tensor, advantages: Tensor, options: ClipOptions) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of each token, and where clipping decided."""
    high = options.clip if options.clip_high is None else options.clip_high
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1.0 - options.clip, 1.0 + high)
    loss = torch.maximum(free, held)
    if options.dual_clip is not None:
        bounded = torch.minimum(loss, -advantages * options.dual_clip)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss, held > free


def per_sequence(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sums over the tokens of each sequence, [num_sequences]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequences, values)


def lengths(batch: TokenBatch) -> Tensor:
    """Trainable tokens of each sequence, [num_sequences], at least one."""
    return torch.bincount(batch.sequences, minlength=batch.num_sequences).clamp(min=1)


def aggregate(tokens: Tensor, batch: TokenBatch, options: ClipOptions) -> Tensor:
    """One number from token losses; its sum over micro-batches and ranks is exact."""
    scale = batch.scale
    if batch.weights is not None:
        tokens = tokens * batch.weights
    if options.aggregation == "token_mean":
        return tokens.sum() * (scale.world / max(scale.tokens, 1))
    if options.aggregation == "seq_mean_token_mean":
        tokens = tokens / lengths(batch)[batch.sequences]
    elif options.norm is not None:
        tokens = tokens / options.norm
    return tokens.sum() * (scale.world / max(scale.sequences, 1))


def ratio_sums(ratio: Tensor, clip_hits: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Statistics that every clipped objective reports."""
    flat = ratio.detach()
    sums = {"ratio": flat.sum(), "clip_fraction": clip_hits.sum()}
    return sums, {"ratio_max": largest(flat)}


def largest(values: Tensor) -> Tensor:
    """The largest of non-negative values; 0 if there are none."""
    return values.max() if values.numel() else values.new_zeros(())
