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
from paceline_rollout.engines.torch.cache import Layered, PrefixGroup
from paceline_rollout.engines.torch.masks import Places

_UNSUPPORTED = ("s_aux", "position_bias")
_MAX_SHORT_COLUMNS = 256


class AttentionContext:
    """Cache and positions of the current forward pass, for the attention of all layers."""

    def __init__(self) -> None:
        self.cache = Layered()
        self.places = Places(torch.empty(0), torch.empty(0))
        self.reads_cache = True  # attention has got keys and values as they are cached


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
    """Torch's attention, or plain matrix products where it lacks a feature or is slower.

    The fused kernel has a cost per (row, head) pair, which dominates a decode step of hundreds of
    short rows.

    Raises:
        InvalidError: the model's attention has a feature that this engine lacks.
    """
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise InvalidError(f"model: attention with {name!r}; the torch engine has none")
    context: Any = module.paceline_context
    cache: Layered = context.cache
    context.reads_cache &= key is cache.latest[0] and value is cache.latest[1]
    if attention_mask is None and query.shape[2] != key.shape[2]:
        raise InvalidError("model: attention without a mask; the torch engine needs one")
    short = (
        query.shape[2] == 1 and key.shape[2] <= _MAX_SHORT_COLUMNS and query.dtype == torch.float32
    )
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
    """Attention of queries to shared prefixes: one product per group of rows."""

    def __init__(self, queries_RHQD: Tensor, cache: Layered, softcap: float | None) -> None:
        self._queries = queries_RHQD
        self._softcap = softcap
        self._layer = cache.layer
        self.groups: Sequence[PrefixGroup] = cache.groups

    def capped(self, scores: Tensor) -> Tensor:
        """Apply the soft cap that some models have."""
        cap = self._softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def of_prefixes(self) -> Tensor:
        """Scores, [R, H, Q, longest prefix]; minus infinity where a row has none."""
        rows, heads, num, _ = self._queries.shape
        longest = max(group.prefix.length for group in self.groups)
        found = self._queries.new_full((rows, heads, num, longest), -torch.inf)
        for group in self.groups:
            keys_HLD = group.prefix.pair(self._layer)[0].float()
            scores = torch.bmm(_fold_rows(self._queries[group.rows]), keys_HLD.transpose(1, 2))
            found[group.rows, :, :, : group.prefix.length] = _unfold_rows(self.capped(scores), num)
        return found

    def mix_in(self, mixed_RHQD: Tensor, probs_RHQL: Tensor) -> None:
        """Add the values of the prefixes."""
        for group in self.groups:
            values_HLD = group.prefix.pair(self._layer)[1].float()
            probs = probs_RHQL[group.rows, :, :, : group.prefix.length]
            mixed_RHQD[group.rows] += _unfold_rows(
                torch.bmm(_fold_rows(probs), values_HLD), probs.shape[2]
            )


def _mix(scores: _Scores, own_RHQL: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The mask may have the columns of the prefixes, before those of the rows."""
    mask = mask if mask.shape[2] == 1 else mask.repeat(1, 1, own_RHQL.shape[2] // mask.shape[2], 1)
    masked = mask.shape[3] - own_RHQL.shape[3]
    whole = scores.capped(own_RHQL).add_(mask[..., masked:])
    if not scores.groups:
        return torch.matmul(torch.softmax(whole, dim=-1), value.float())
    before = scores.of_prefixes()
    if masked:
        before += mask[..., :masked]
    probs = torch.softmax(torch.cat([before, whole], dim=-1), dim=-1)
    mixed = torch.matmul(probs[..., before.shape[3] :], value.float())
    scores.mix_in(mixed, probs)
    return mixed


def _fold_rows(some_RHQX: Tensor) -> Tensor:
    """[H, R*Q, X]: all rows of a group against the same keys."""
    rows, heads, num, last = some_RHQX.shape
    return some_RHQX.transpose(0, 1).reshape(heads, rows * num, last)


def _unfold_rows(some_HNX: Tensor, num: int) -> Tensor:
    """The inverse of `_fold_rows`."""
    heads, lines, last = some_HNX.shape
    return some_HNX.view(heads, lines // num, num, last).transpose(0, 1)
