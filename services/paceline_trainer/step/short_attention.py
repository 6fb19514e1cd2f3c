"""Attention for short sequences on a CPU.

torch's kernel for CPUs is made for long sequences. For segments of a prefix tree it is slower than
matrix products by a factor of 1.5 to 6 in float32, and by up to 29 in bfloat16, most of it in the
backward pass (2 cores with AMX; 200 segments of 4 queries and 30 keys: 146 ms against 5 ms).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

LONGEST = 256
"""Queries and keys up to which this is faster. Beyond, torch's kernel saves memory, too: it keeps
no probabilities."""


def is_short(query: Tensor, key: Tensor) -> bool:
    """Whether `short_attention` is the faster way; [S, H, Q, D] and [S, H', K, D]."""
    return query.device.type == "cpu" and max(query.shape[2], key.shape[2]) <= LONGEST


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Softmax attention with scores and probabilities in float32 at least.

    Args:
        query: [S, H, Q, D].
        key: [S, H', K, D]; H' divides H, and neighbouring heads share keys and values.
        value: [S, H', K, V].
        mask: bool [S, 1, Q, K], True for keys that a query sees; None: causal, and Q is K.
        scaling: of the scores; None: 1 / sqrt(D).

    Returns:
        [S, H, Q, V].
    """
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return cast(Tensor, _ShortAttention.apply(query, key, value, mask, scale))


class _ShortAttention(torch.autograd.Function):
    """Heads that share keys are rows of one product, so that keys are never repeated."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        rows = _by_key_head(query, key)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = torch.matmul(rows.to(wide), key.to(wide).transpose(2, 3)).mul_(scale)
        _hide(scores, mask, num_queries=query.shape[2])
        chances = scores.softmax(-1)
        out = torch.matmul(chances.to(value.dtype), value)
        ctx.save_for_backward(rows, key, value, chances, out)
        ctx.scale = scale
        return out.view(*query.shape[:3], -1)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        rows, key, value, chances, out = ctx.saved_tensors
        given = gradient.reshape(out.shape)
        of_value = torch.matmul(chances.to(value.dtype).transpose(2, 3), given)
        of_chances = torch.matmul(given, value.transpose(2, 3)).to(chances.dtype)
        # The softmax: dS = P (dP - sum over keys of P dP), and that sum is the one over dO O.
        mean = (given * out).sum(-1, keepdim=True, dtype=chances.dtype)
        of_scores = of_chances.sub_(mean).mul_(chances).mul_(ctx.scale).to(key.dtype)
        of_query = torch.matmul(of_scores, key)
        of_key = torch.matmul(of_scores.transpose(2, 3), rows)
        return of_query.view(*gradient.shape[:3], -1), of_key, of_value, None, None


def _by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """[S, H, Q, D] as [S, H', H / H' Q, D]."""
    return query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])


def _hide(scores: Tensor, mask: Tensor | None, *, num_queries: int) -> None:
    """Set scores [S, H', G Q, K] of keys that a query does not see to the least finite one.

    Queries of padding may see no key, and would be NaN with negative infinity.
    """
    by_head = scores.view(*scores.shape[:2], -1, num_queries, scores.shape[3])
    if mask is None:
        seen = torch.ones(by_head.shape[3:], dtype=torch.bool).tril()
    else:
        seen = mask[:, :, None]
    by_head.masked_fill_(~seen, torch.finfo(scores.dtype).min)
