"""Log-probs of chosen tokens, from logits that are read in blocks small enough for a cache.

Written with tensor operations on all rows, softmax and its gradient pass over a float32 copy of the
logits a dozen times, which costs a small model with a large vocabulary a sixth of its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from paceline_trainer.step.fused import fused, reason_not

BLOCK = 1 << 18  # logits; 1 MiB in float32


def chosen_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor | float) -> Tensor:
    """Log softmax(logits / temperature) at `targets`, computed in float32 at least.

    Args:
        logits: [P, V], of any precision, in which their gradient is returned.
        targets: [P], below V.
        temperature: [P], or one number.

    Returns:
        [P], float32 or wider.
    """
    return cast(Tensor, _ChosenLogprobs.apply(logits, targets, temperature))


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor | float) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.empty(len(logits), dtype=wide, device=logits.device)
        normaliser = torch.empty_like(logprobs)
        for at in _blocks(logits):
            found = _scores(logits[at], targets[at], _part(temperature, at))
            logprobs[at], normaliser[at] = found
        ctx.save_for_backward(logits, targets, normaliser)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None]:
        logits, targets, normaliser = ctx.saved_tensors
        temperature: Tensor | float = ctx.temperature
        of_logits = torch.empty_like(logits)
        outer = (gradient / temperature)[:, None]
        for at in _blocks(logits):
            heat = _part(temperature, at)
            of_logits[at] = _gradient(logits[at], targets[at], heat, normaliser[at], outer[at])
        return of_logits, None, None


@fused
def _scores(logits: Tensor, targets: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, and the logarithm of the normaliser."""
    block = _scaled(logits, temperature)
    normaliser = torch.logsumexp(block, -1)
    return block.gather(-1, targets[:, None])[:, 0] - normaliser, normaliser


def _gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    normaliser: Tensor,
    outer: Tensor,
) -> Tensor:
    """What `outer` [P, 1] is for log-probs, for their logits."""
    if logits.device.type == "cpu":  # in place, which a cache is too small to do without
        block = _scaled(logits, temperature) - normaliser[:, None]
        return block.exp_().mul_(-outer).scatter_add_(1, targets[:, None], outer)
    return _fused_gradient(logits, targets, temperature, normaliser, outer)


@fused
def _fused_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    normaliser: Tensor,
    outer: Tensor,
) -> Tensor:
    chances = (_scaled(logits, temperature) - normaliser[:, None]).exp()
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return (outer * (chosen.to(chances.dtype) - chances)).to(logits.dtype)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Rows of `BLOCK` logits on a CPU; a GPU has no such cache, and each block costs launches."""
    if reason_not(logits.device.type):
        size = BLOCK if logits.device.type == "cpu" else BLOCK * 64
    else:
        size = logits.numel()  # compiled, nothing but the result is written
    rows = max(size // logits.shape[1], 1)
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _part(temperature: Tensor | float, at: slice) -> Tensor | float:
    return temperature[at] if isinstance(temperature, Tensor) else temperature


def _scaled(block: Tensor, temperature: Tensor | float) -> Tensor:
    wide = block.to(torch.promote_types(block.dtype, torch.float32))
    if isinstance(temperature, Tensor):
        return wide / temperature[:, None]
    return wide if temperature == 1.0 else wide / temperature
