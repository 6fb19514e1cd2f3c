"""Attention over a prefix tree: a token attends to the tokens on its own path from the root.

Hugging Face models call it for every layer. Projections, norms and MLPs see one row in which each
token of the tree occurs once; only here keys and values of shared prefixes are repeated.

Legend of shapes: T tokens of the row, H heads, D head size; S segments of a block, Q and K the most
queries and keys of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from paceline.errors import InvalidError
from paceline_trainer.columns import Ints
from paceline_trainer.step.flash_tree import FlashTree, takes
from paceline_trainer.step.short_attention import is_short, short_attention
from paceline_trainer.step.tree import PrefixTree, Segment

NAME = "paceline_tree"
MIN_GAP = 16  # tokens of padding that are cheaper than one more block
_UNSUPPORTED = ("s_aux", "position_bias")


class Gather:
    """Rows of a tensor by index; the gradient is summed by the opposite index."""

    def __init__(self, index: Ints, size: int, real: Ints, device: torch.device) -> None:
        """`index` into `size` rows, of which those at `real` alone have a gradient."""
        sources = real[np.argsort(index[real], kind="stable")]
        ends = np.cumsum(np.bincount(index[real], minlength=size))
        self.index = torch.from_numpy(index).to(device)
        self.sources = torch.from_numpy(sources).to(device)
        self.offsets = torch.from_numpy(np.concatenate(([0], ends))).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """Rows [len(index), C] of `values` [size, C]."""
        return cast(Tensor, _Gather.apply(values, self))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return values.index_select(0, gather.index)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        gather: Gather = ctx.gather
        # Sums of lists of rows; `index_add_` adds them one by one.
        summed = functional.embedding_bag(
            gather.sources, gradient, gather.offsets, mode="sum", include_last_offset=True
        )
        return summed, None


class SegmentBlock:
    """Segments of similar size, padded to Q and K; padding comes last."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.owners = np.array([each.first for each in segments])
        self.starts = np.array([each.start for each in segments])
        self.ends = np.array([each.end for each in segments])
        self.num_queries = int((self.ends - self.starts).max())
        self.num_keys = int(self.ends.max())
        self._device = device
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def queries(self) -> Ints:
        """Places of the queries on the paths of their sequences, [S, Q]."""
        return self.starts[:, None] + np.arange(self.num_queries)

    @property
    def keys(self) -> Ints:
        """The same of the keys, [S, K]."""
        return np.broadcast_to(np.arange(self.num_keys), (len(self.owners), self.num_keys))

    def mask(self, window: int | None) -> Tensor | None:
        """Which keys a query sees, bool [S, 1, Q, K]; None: those up to its own place."""
        if window is not None and window >= self.num_keys:
            window = None
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        if window is None and not self.starts.any():
            return None
        # A query of padding sees what the last real one sees: never nothing, which is NaN.
        queries = np.minimum(self.queries, self.ends[:, None] - 1)
        behind = queries[:, :, None] - self.keys[:, None, :]
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        return torch.from_numpy(seen[:, None]).to(self._device)


class TreeAttention:
    """The attention of all layers for one row of tokens, in the way that suits the device."""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self._tree = tree
        self._device = device
        self._longest = tree.places.shape[1]
        self.windows: set[int | None] = set()  # that layers have asked for
        # A mask of four dimensions is taken as it is, so that models make none of [T, T].
        self.no_mask = torch.zeros(1, 1, 1, 1, device=device)

    @cached_property
    def _flash(self) -> FlashTree:
        return FlashTree(self._tree, self._device)

    @cached_property
    def _blocks(self) -> BlockTree:
        return BlockTree(self._tree, self._device)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend; `query` is [1, H, T, D], `key` and `value` have as many heads or fewer.

        Returns:
            [1, T, H, D].
        """
        self.windows.add(window)
        everything = softcap is None and (window is None or window >= self._longest)
        if everything and takes(query, value):
            return self._flash(query, key, value, scaling=scaling)
        return self._blocks(query, key, value, scaling=scaling, window=window, softcap=softcap)


class BlockTree:
    """Attention by blocks of padded segments, with any window and cap of the scores."""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self.blocks = [SegmentBlock(segments, device) for segments in _alike(tree.segments)]
        asked, real_queries = _places(tree, self.blocks, lambda block: block.queries)
        seen, real_keys = _places(tree, self.blocks, lambda block: block.keys)
        back = np.zeros(tree.num_tokens, np.int64)
        back[asked[real_queries]] = real_queries
        self._queries = Gather(asked, tree.num_tokens, real_queries, device)
        self._keys = Gather(seen, tree.num_tokens, real_keys, device)
        self._back = Gather(back, len(asked), np.arange(len(back)), device)
        self._query_sizes = [block.queries.size for block in self.blocks]
        self._key_sizes = [block.keys.size for block in self.blocks]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """As `TreeAttention`."""
        heads, size = query.shape[1], query.shape[3]
        queries = self._queries(_rows(query)).split(self._query_sizes)
        keys = self._keys(_rows(key)).split(self._key_sizes)
        values = self._keys(_rows(value)).split(self._key_sizes)
        done: list[Tensor] = []
        for block, asked, seen, read in zip(self.blocks, queries, keys, values, strict=True):
            out = attend(
                _heads(asked, block.num_queries, size),
                _heads(seen, block.num_keys, size),
                _heads(read, block.num_keys, value.shape[3]),
                block.mask(window),
                scaling=scaling,
                softcap=softcap,
            )
            done.append(_rows(out))
        joined = torch.cat(done) if len(done) > 1 else done[0]
        return self._back(joined).view(1, query.shape[2], heads, -1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Softmax attention [S, H, Q, D]; without a mask it is causal, the queries being the last Q.

    Only with a `softcap` may Q be less than K then.
    """
    if softcap is None and is_short(query, key):
        return short_attention(query, key, value, mask, scaling)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling
        )
    scores = torch.matmul(query, key.transpose(2, 3)).float()
    scores = scores * (query.shape[3] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        mask = mask.tril(scores.shape[3] - scores.shape[2])
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    tree: TreeAttention | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a Hugging Face model calls; without a `tree`, rows are padded sequences.

    Raises:
        InvalidError: the model's attention has a feature that the trainer lacks.
    """
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise InvalidError(f"model: attention with {name!r}; the trainer has none")
    if tree is not None:
        out = tree(query, key, value, scaling=scaling, window=sliding_window, softcap=softcap)
        return out, None
    plain = softcap is None and not _is_short_row(module, query, key, attention_mask)
    if plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    out = attend(query, key, value, attention_mask, scaling=scaling, softcap=softcap)
    return out.transpose(1, 2), None


def keep_out_of_graphs() -> None:
    """Let layers be compiled around attention: what it does depends on the tree."""
    AttentionInterface.register(NAME, torch.compiler.disable(attention))


def _is_short_row(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` understands the mask of padded rows, and is faster than torch's kernel."""
    if mask is None:
        known = getattr(module, "is_causal", True) and query.shape[2] == key.shape[2]
    else:
        known = mask.dtype == torch.bool
    return known and is_short(query, key)


def _alike(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Runs of segments whose padding to a common size wastes little; roots apart.

    Roots need no mask, which the kernels are faster without.
    """
    block: list[Segment] = []
    for each in sorted(segments, key=lambda each: (each.start > 0, -each.end, -each.size)):
        if block and not _fits(block[0], each):
            yield block
            block = []
        block.append(each)
    if block:
        yield block


def _fits(largest: Segment, each: Segment) -> bool:
    gap = max(largest.end // 2, MIN_GAP)
    return (largest.start > 0) == (each.start > 0) and largest.end - each.end <= gap


def _places(
    tree: PrefixTree, blocks: Sequence[SegmentBlock], of: Callable[[SegmentBlock], Ints]
) -> tuple[Ints, Ints]:
    """Indices into the row of what the blocks need, flat, and which of them are not padding."""
    indices: list[Ints] = []
    real: list[Any] = []
    for block in blocks:
        own = of(block)
        within = own < block.ends[:, None]
        indices.append(tree.places[block.owners[:, None], np.where(within, own, 0)].reshape(-1))
        real.append(within.reshape(-1))
    return np.concatenate(indices), np.flatnonzero(np.concatenate(real))


def _rows(values: Tensor) -> Tensor:
    """[S, H, L, D] as rows [S L, H D]."""
    return values.transpose(1, 2).reshape(values.shape[0] * values.shape[2], -1)


def _heads(rows: Tensor, length: int, size: int) -> Tensor:
    """Rows [S L, H D] as [S, H, L, D]."""
    return rows.view(-1, length, rows.shape[1] // size, size).transpose(1, 2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
