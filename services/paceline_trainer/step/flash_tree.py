"""Flash attention over a prefix tree, on a GPU: no key is repeated, and nothing is padded.

The tokens that a token sees are those of its own segment up to itself, and all of each segment
above it. So there is one causal pass in which every segment is a sequence of its own, and one pass
for each level of the tree in which all tokens below a segment of that level see all of it. Passes
are joined by the logarithms of their normalisers, and the backward pass gives each of them the
joined output and normaliser, as in ring attention (Liu et al., 2023, arXiv:2310.01889, section 3).

Legend of shapes: T tokens of the row, H heads, H' heads of keys, D head size; Q queries and K keys
of a pass, of n pairs of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from paceline_trainer.columns import Ints
from paceline_trainer.step.fused import fused
from paceline_trainer.step.tree import PrefixTree, ranges

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Pass:
    """Sequences of queries, each of which sees one sequence of keys."""

    queries: Tensor | None  # [Q] places in the row; None: the whole row
    keys: Tensor | None  # [K] likewise
    query_ends: Tensor  # int32 [n + 1], from 0
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool


class Kernel(Protocol):
    """Attention of several sequences that lie one after the other."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, each: Pass, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The output [Q, H, D], and the logarithm of its normaliser, float32 [H, Q]."""
        ...

    def backward(
        self, saved: tuple[Tensor, ...], gradient: Tensor, each: Pass, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; `saved`: these, output and normaliser."""
        ...


class FlashKernel:
    """The kernel of torch, for GPUs."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, each: Pass, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        found: Any = torch.ops.aten._flash_attention_forward(
            query, key, value, *_sizes(each), 0.0, each.causal, False, scale=scale
        )
        return found[0], found[1]

    def backward(
        self, saved: tuple[Tensor, ...], gradient: Tensor, each: Pass, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        # The state of a random generator, which nothing is drawn from.
        state = torch.zeros(2, dtype=torch.uint64, device=gradient.device)
        found: Any = torch.ops.aten._flash_attention_backward(
            gradient, *saved, *_sizes(each), 0.0, each.causal, state, state, scale=scale
        )
        return found


def _sizes(each: Pass) -> tuple[Tensor, Tensor, int, int]:
    return each.query_ends, each.key_ends, each.longest_query, each.longest_key


class FlashTree:
    """The attention of all layers for one row of tokens."""

    def __init__(
        self, tree: PrefixTree, device: torch.device, kernel: Kernel | None = None
    ) -> None:
        self._kernel = kernel or FlashKernel()
        self._passes = tuple(_passes(tree, device))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None = None
    ) -> Tensor:
        """Attend; `query` is [1, H, T, D], `key` and `value` have as many heads or fewer.

        Returns:
            [1, T, H, D].
        """
        rows = (each[0].transpose(0, 1) for each in (query, key, value))
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return cast(Tensor, _FlashTree.apply(*rows, self._passes, self._kernel, scale))[None]


def takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel of torch can compute this."""
    size = query.shape[3]
    fits = size <= _LARGEST_HEAD and size % 8 == 0 and value.shape[3] == size
    return query.device.type == "cuda" and query.dtype in _DTYPES and fits


class _FlashTree(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        passes: Sequence[Pass],
        kernel: Kernel,
        scale: float,
    ) -> Tensor:
        own, *above = passes
        out, normaliser = kernel.forward(query, key, value, own, scale)
        joined = _wide(out) if above else out
        for each in above:
            seen = (query[each.queries], key[each.keys], value[each.keys])
            part, other = kernel.forward(*seen, each, scale)
            rows, after = _joined(joined[each.queries], normaliser[:, each.queries], part, other)
            joined[each.queries] = rows
            normaliser[:, each.queries] = after
        out = joined.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.passes, ctx.kernel, ctx.scale = passes, kernel, scale
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        kernel: Kernel = ctx.kernel
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        query, key, value, out, normaliser = saved
        own, *above = ctx.passes
        gradient = gradient.contiguous()
        found = kernel.backward(saved, gradient, own, ctx.scale)
        sums = [_wide(each) for each in found] if above else list(found)
        for each in above:
            below = (query[each.queries], key[each.keys], value[each.keys], out[each.queries])
            part = kernel.backward(
                (*below, normaliser[:, each.queries].contiguous()),
                gradient[each.queries],
                each,
                ctx.scale,
            )
            places = (each.queries, each.keys, each.keys)
            for total, place, more in zip(sums, places, part, strict=True):
                total.index_add_(0, place, more.to(total.dtype))
        of_query, of_key, of_value = (x.to(query.dtype) for x in sums)
        return of_query, of_key, of_value, None, None, None


@fused
def _joined(one: Tensor, before: Tensor, two: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [Q, H, D] and normalisers [H, Q] of two passes as those of one."""
    after = torch.logaddexp(before, other)
    kept, added = (before - after).exp().t()[..., None], (other - after).exp().t()[..., None]
    return one * kept + two * added, after


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _passes(tree: PrefixTree, device: torch.device) -> list[Pass]:
    sizes = np.array([each.size for each in tree.segments], np.int64)
    starts = np.cumsum(sizes) - sizes
    found = [_pass(None, None, sizes, sizes, device)]
    chains = _chains(tree)
    for level in range(max(map(len, chains), default=0)):
        below: dict[int, list[int]] = {}
        for segment, chain in enumerate(chains):
            if len(chain) > level:
                below.setdefault(chain[level], []).append(segment)
        above, members = np.array(list(below)), np.concatenate(list(below.values()))
        queries = ranges(starts[members], sizes[members])
        counts = np.array([sizes[each].sum() for each in below.values()])
        keys = ranges(starts[above], sizes[above])
        found.append(_pass(queries, keys, counts, sizes[above], device))
    return found


def _pass(
    queries: Ints | None, keys: Ints | None, counts: Ints, sizes: Ints, device: torch.device
) -> Pass:
    return Pass(
        queries=None if queries is None else to_device(queries, device),
        keys=None if keys is None else to_device(keys, device),
        query_ends=_ends(counts, device),
        key_ends=_ends(sizes, device),
        longest_query=int(counts.max()),
        longest_key=int(sizes.max()),
        causal=queries is None,
    )


def _ends(counts: Ints, device: torch.device) -> Tensor:
    return to_device(np.concatenate(([0], np.cumsum(counts))).astype(np.int32), device)


def _chains(tree: PrefixTree) -> list[tuple[int, ...]]:
    """The segments above each segment, from the root; a segment lies behind those above it."""
    chains: list[tuple[int, ...]] = []
    last: dict[int, int] = {}  # the lowest segment of each sequence so far
    for index, each in enumerate(tree.segments):
        parent = last.get(each.first)
        chains.append(() if parent is None else (*chains[parent], parent))
        last.update(dict.fromkeys(range(each.first, each.last), index))
    return chains


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor; a copy to a GPU does not wait for what the GPU is doing."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
