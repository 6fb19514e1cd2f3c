"""Attention over a shared prefix and a row's own tokens, as one softmax over both.

Legend of shapes: R rows, H key/value heads, Q queries of a head (its query heads x positions),
L columns, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.errors import InvalidError
from paceline_rollout.engines.torch.cache import Group, Layered

_UNKNOWN = ("s_aux", "position_bias")
_SHORT = 256


class Here:
    """What the attention of a model's layers must know of the pass that is under way."""

    def __init__(self) -> None:
        self.cache = Layered()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Torch's attention, or plain products where it lacks something or is slower.

    The fused kernel pays for each (row, head) pair; with hundreds of short rows that is most of
    a decode step.

    Raises:
        InvalidError: the model's attention has a part that is unknown here.
    """
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise InvalidError(f"model: attention with {name!r}; the torch engine has none")
    here: Any = module.here
    cache: Layered = here.cache
    short = query.shape[2] == 1 and key.shape[2] <= _SHORT and query.dtype == torch.float32
    if attention_mask is None or not (cache.groups or softcap or short):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    rows, heads, num, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    folded_RHQD = query.reshape(rows, key.shape[1], -1, size).float() * scale
    scores_RHQL = torch.matmul(folded_RHQD, key.float().transpose(2, 3))
    mixed = _mix(_Scores(folded_RHQD, cache, softcap), scores_RHQL, value, attention_mask)
    out = mixed.view(rows, heads, num, value.shape[3]).transpose(1, 2)
    return out.to(query.dtype), None


class _Scores:
    """Queries against prefixes, a product for each group of rows that share one."""

    def __init__(self, queries_RHQD: Tensor, cache: Layered, softcap: float | None) -> None:
        self._queries = queries_RHQD
        self._softcap = softcap
        self._layer = cache.layer
        self.groups: Sequence[Group] = cache.groups

    def capped(self, scores: Tensor) -> Tensor:
        """As some models bend them."""
        cap = self._softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def of_prefixes(self) -> Tensor:
        """[R, H, Q, longest prefix]; minus infinity where a row has none."""
        rows, heads, num, _ = self._queries.shape
        longest = max(group.prefix.length for group in self.groups)
        found = self._queries.new_full((rows, heads, num, longest), -torch.inf)
        for group in self.groups:
            keys_HLD = group.prefix.pair(self._layer)[0].float()
            scores = torch.bmm(_lined(self._queries[group.rows]), keys_HLD.transpose(1, 2))
            found[group.rows, :, :, : group.prefix.length] = _rowed(self.capped(scores), num)
        return found

    def mix_in(self, mixed_RHQD: Tensor, probs_RHQL: Tensor) -> None:
        """Add the prefixes' values."""
        for group in self.groups:
            values_HLD = group.prefix.pair(self._layer)[1].float()
            probs = probs_RHQL[group.rows, :, :, : group.prefix.length]
            mixed_RHQD[group.rows] += _rowed(torch.bmm(_lined(probs), values_HLD), probs.shape[2])


def _mix(scores: _Scores, own_RHQL: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    times = own_RHQL.shape[2] // mask.shape[2]
    whole = scores.capped(own_RHQL).add_(
        mask if mask.shape[2] == 1 else mask.repeat(1, 1, times, 1)
    )
    if not scores.groups:
        return torch.matmul(torch.softmax(whole, dim=-1), value.float())
    before = scores.of_prefixes()
    probs = torch.softmax(torch.cat([before, whole], dim=-1), dim=-1)
    mixed = torch.matmul(probs[..., before.shape[3] :], value.float())
    scores.mix_in(mixed, probs)
    return mixed


def _lined(some_RHQX: Tensor) -> Tensor:
    """[H, R*Q, X]: all rows of a group against the same keys."""
    rows, heads, num, last = some_RHQX.shape
    return some_RHQX.transpose(0, 1).reshape(heads, rows * num, last)


def _rowed(some_HNX: Tensor, num: int) -> Tensor:
    """The inverse of `_lined`."""
    heads, lines, last = some_HNX.shape
    return some_HNX.view(heads, lines // num, num, last).transpose(0, 1)
