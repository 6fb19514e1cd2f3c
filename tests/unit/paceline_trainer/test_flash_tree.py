"""Attention by passes over a prefix tree, with the kernel of a GPU or one that stands for it."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline_trainer.step.flash_tree import FlashTree, Kernel, Pass
from paceline_trainer.step.tree import PrefixTree, prefix_order, prefix_tree

HEADS, KEY_HEADS = 4, 2
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def softmax(scores: Tensor, normaliser: Tensor) -> Tensor:
    return (scores - normaliser[..., None]).exp()


class SlowKernel:
    """Attention as it is defined, with the interface of the kernel of a GPU."""

    def _pairs(self, each: Pass) -> list[tuple[slice, slice]]:
        ends = [each.query_ends.tolist(), each.key_ends.tolist()]
        asked, seen = (list(itertools.starmap(slice, itertools.pairwise(e))) for e in ends)
        return list(zip(asked, seen, strict=True))

    def _scores(self, query: Tensor, key: Tensor, each: Pass, scale: float) -> Tensor:
        many = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query, many) * scale
        if each.causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:]).tril().bool(), -torch.inf)
        return scores

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, each: Pass, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(query)
        normaliser = torch.zeros(query.shape[1], len(query), dtype=query.dtype)
        for asked, seen in self._pairs(each):
            scores = self._scores(query[asked], key[seen], each, scale)
            normaliser[:, asked] = scores.logsumexp(-1)
            many = value[seen].repeat_interleave(query.shape[1] // key.shape[1], 1)
            out[asked] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), many)
        return out, normaliser

    def backward(
        self, saved: tuple[Tensor, ...], gradient: Tensor, each: Pass, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, normaliser = saved
        found = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        groups = query.shape[1] // key.shape[1]
        for asked, seen in self._pairs(each):
            scores = self._scores(query[asked], key[seen], each, scale)
            chances = softmax(scores, normaliser[:, asked])
            many_keys, many = (x[seen].repeat_interleave(groups, 1) for x in (key, value))
            mean = (gradient[asked] * out[asked]).sum(-1).t()[..., None]
            of_chances = torch.einsum("qhd,khd->hqk", gradient[asked], many)
            of_scores = chances * (of_chances - mean) * scale
            found[0][asked] = torch.einsum("hqk,khd->qhd", of_scores, many_keys)
            of_keys = torch.einsum("hqk,qhd->khd", of_scores, query[asked])
            of_values = torch.einsum("hqk,qhd->khd", chances, gradient[asked])
            for total, part in ((found[1], of_keys), (found[2], of_values)):
                total[seen] = part.view(len(part), -1, groups, part.shape[2]).sum(2)
        return found


def tree_of(sequences: list[list[int]], least: int) -> PrefixTree:
    tokens = np.concatenate(sequences)
    used = np.array([len(each) for each in sequences])
    order, common = prefix_order(tokens, np.cumsum(used) - used, used)
    return prefix_tree(used[order], common, least=least)


def expected(tree: PrefixTree, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention [T, H, D] of each sequence on its own, in double precision."""
    out = torch.zeros_like(query)
    lengths = [max(s.end for s in tree.segments if s.first <= n < s.last) for n in range(num(tree))]
    for row, length in enumerate(lengths):
        places = torch.from_numpy(tree.places[row, :length])
        q, k, v = (each[places].transpose(0, 1)[None] for each in (query, key, value))
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.index_copy(0, places.to(out.device), found[0].transpose(0, 1))
    return out


def num(tree: PrefixTree) -> int:
    return max(each.last for each in tree.segments)


def differences(tree: PrefixTree, kernel: Kernel | None, device: str, dtype: torch.dtype) -> float:
    """The largest relative difference of the output and of its three gradients."""
    torch.manual_seed(0)
    size = 64 if device == "cuda" else 8
    shapes = [(tree.num_tokens, heads, size) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    given_ = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], device=device).to(dtype)
    exact = [each.double().cpu().clone().requires_grad_() for each in given_]
    out = expected(tree, exact[0], exact[1], exact[2])
    (out * weights.double().cpu()).sum().backward()
    own = [each.clone().requires_grad_() for each in given_]
    rows = [each.transpose(0, 1)[None] for each in own]
    found = FlashTree(tree, torch.device(device), kernel)(rows[0], rows[1], rows[2])[0]
    (found * weights).sum().backward()
    pairs = [(found, out.detach()), *((a.grad, b.grad) for a, b in zip(own, exact, strict=True))]
    worst = 0.0
    for one, two in pairs:
        assert one is not None
        assert two is not None
        gap = (one.detach().double().cpu() - two).norm() / two.norm().clamp_min(1e-3)
        worst = max(worst, float(gap))
    return worst


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12)


@given(SEQUENCES, st.sampled_from([1, 3]))
@settings(max_examples=100, deadline=None)
def test_passes_are_the_attention_of_each_sequence(sequences: list[list[int]], least: int) -> None:
    tree = tree_of(sequences, least)
    assert differences(tree, SlowKernel(), "cpu", torch.float64) < 1e-9


@given(SEQUENCES, st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_short_common_beginnings_are_not_shared(sequences: list[list[int]], least: int) -> None:
    tree = tree_of(sequences, least)
    assert all(each.size >= least for each in tree.segments if each.last - each.first > 1)
    tokens = sorted(sequences)
    for row in range(len(tokens)):
        own = [each for each in tree.segments if each.first <= row < each.last]
        assert [0, *(each.end for each in own)][:-1] == [each.start for each in own]
    assert tree.num_tokens == sum(each.size for each in tree.segments)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_a_gpu(dtype: torch.dtype) -> None:
    chance = np.random.default_rng(0)
    prompts = [chance.integers(0, 9, size).tolist() for size in (200, 37, 1)]
    sequences = [
        [*prompt, *chance.integers(0, 9, int(chance.integers(1, 300))).tolist()]
        for prompt in prompts
        for _ in range(6)
    ]
    for least in (1, 32):
        assert differences(tree_of(sequences, least), None, "cuda", dtype) < 2e-2
