"""Vectorised sampling: one row per request, one tensor per parameter.

Legend of shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

OFF = 2.0  # a top_p that never excludes a token, whatever the rounding
_BLOCK = 256  # tokens of the vocabulary
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of N rows, and which kinds occur among them."""

    temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int64; V or more: off
    top_p: Tensor  # float32; OFF: off
    min_p: Tensor  # float32; 0: off
    restricted: bool
    greedy: bool
    tempered: bool  # some temperature is neither 0 nor 1


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 in [0, 1), a pure function of (seed, position): splitmix64 applied twice."""
    bits = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return _shift(bits, 11).double() * 2.0**-53


def sample(logits_NV: Tensor, params: SamplingBatch, u_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs `log_softmax(logits / temperature)`, not renormalised.

    Greedy rows take the largest logit and its log-prob at temperature 1.
    """
    if params.tempered:
        temperature = torch.where(params.temperature > 0, params.temperature, 1.0).unsqueeze(1)
        logits_NV = logits_NV.float() / temperature
    probs_NV = torch.softmax(logits_NV, dim=-1, dtype=torch.float32)
    tokens_N = invert(restrict(probs_NV, params) if params.restricted else probs_NV, u_N)
    if params.greedy:
        tokens_N = torch.where(params.temperature > 0, tokens_N, logits_NV.argmax(-1))
    return tokens_N, probs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1).log()


def invert(probs_NV: Tensor, u_N: Tensor) -> Tensor:
    """The token at which the cumulative probability exceeds `u`; never one of probability 0.

    Finds a block of the vocabulary first, then the token in it: a cumulative sum over a large
    vocabulary costs more than all other steps.
    """
    num, size = probs_NV.shape
    if size <= 4 * _BLOCK:
        return _passed(probs_NV, u_N)[0]
    whole = size - size % _BLOCK
    sums_NS = probs_NV[:, :whole].view(num, -1, _BLOCK).sum(-1)
    if whole < size:
        sums_NS = torch.cat([sums_NS, probs_NV[:, whole:].sum(-1, keepdim=True)], dim=1)
    block_N, u_N = _passed(sums_NS, u_N)
    indices_NX = block_N.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK, device=u_N.device)
    inside_NX = probs_NV.gather(1, indices_NX.clamp(max=size - 1)) * (indices_NX < size)
    return block_N * _BLOCK + _passed(inside_NX, u_N)[0]


def _passed(parts_NX: Tensor, u_N: Tensor) -> tuple[Tensor, Tensor]:
    """The part at which the cumulative sum exceeds the share `u`, and where in it, in [0, 1]."""
    sums_NX = parts_NX.cumsum(-1, dtype=torch.float64)
    total_N1 = sums_NX[:, -1:]
    # u * total may round to total itself, which no part exceeds.
    max_N1 = torch.nextafter(total_N1, torch.zeros_like(total_N1))
    target_N1 = torch.minimum(u_N.unsqueeze(1) * total_N1, max_N1)
    found_N1 = torch.searchsorted(sums_NX, target_N1, right=True).clamp_(max=parts_NX.shape[1] - 1)
    part_N1 = parts_NX.gather(1, found_N1).double()
    before_N1 = sums_NX.gather(1, found_N1) - part_N1
    share_N = ((target_N1 - before_N1) / part_N1).clamp_(0, 1).squeeze(1)
    return found_N1.squeeze(1), share_N


def restrict(probs_NV: Tensor, params: SamplingBatch) -> Tensor:
    """Zero the tokens that top-k, then top-p over the rest, then min-p exclude."""
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_NV.shape[1], device=probs_NV.device)
    keep_NV = ranks_V < params.top_k.unsqueeze(1)
    kept_NV = sorted_NV * keep_NV
    sums_NV = kept_NV.cumsum(-1, dtype=torch.float64)
    before_NV = (sums_NV - kept_NV) / sums_NV[:, -1:]
    keep_NV = keep_NV & (before_NV < params.top_p.unsqueeze(1))
    keep_NV = keep_NV & (sorted_NV >= params.min_p.unsqueeze(1) * sorted_NV[:, :1])
    keep_NV[:, 0] = True
    return torch.zeros_like(probs_NV).scatter_(1, order_NV, sorted_NV * keep_NV)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
