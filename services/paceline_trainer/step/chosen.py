"""Log-probs of chosen tokens, from logits that are read in blocks small enough for a cache.

Written with tensor operations on all rows, softmax and its gradient pass over a float32 copy of the
logits a dozen times, which costs a small model with a large vocabulary a sixth of its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

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
            block = _scaled(logits[at], temperature, at, wide)
            torch.logsumexp(block, -1, out=normaliser[at])
            logprobs[at] = block.gather(-1, targets[at, None])[:, 0] - normaliser[at]
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
            block = _scaled(logits[at], temperature, at, normaliser.dtype) - normaliser[at, None]
            block.exp_().mul_(-outer[at]).scatter_add_(1, targets[at, None], outer[at])
            of_logits[at] = block
        return of_logits, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Rows of `BLOCK` logits on a CPU; a GPU has no such cache, and each block costs launches."""
    size = BLOCK if logits.device.type == "cpu" else BLOCK * 64
    rows = max(size // logits.shape[1], 1)
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _scaled(block: Tensor, temperature: Tensor | float, at: slice, dtype: torch.dtype) -> Tensor:
    wide = block.to(dtype)
    if isinstance(temperature, Tensor):
        return wide / temperature[at, None]
    return wide if temperature == 1.0 else wide / temperature
